"""The report: what the analysis has found, as one HTML file that needs nothing but itself.

    the analysis' tables ──► history, company, retries ──► charts (Altair, drawn as SVG) ──► page
                             (small rows)        └──► words (what is seen, said)  ──┘

Journeys are read batch by batch and counted into bins, so that memory does not grow with the log. Nothing here needs Java.
"""
