"""Serve the console: pages on which people see what Rooms does, and mend it.

Every page and every action calls the HTTP API, in the process, as the person who signed in:

    browser ── cookie ──▶ page handler ── Authorization ──▶ /v1 ── services

So the console can do nothing that the API cannot, and no rule is written twice: scopes,
restrictions, bounds, errors and the journal are those of the API.

| module | does |
| --- | --- |
| `app` | registers every page, and answers errors as pages |
| `api_client` | calls the API in the process |
| `page` | what a handler gets: the caller, the client, the language, and how to render |
| `sessions`, `sign_in` | sessions, and tokens against forged requests |
| `live` | sends the changed part of an open page |
| `formatting`, `charts` | languages, numbers and times, drawings |

Pages work without scripts; `static/console.js` makes them live.
"""
