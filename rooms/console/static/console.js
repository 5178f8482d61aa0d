// Makes pages live and quick to use. Every page works without it.

const live = document.getElementById("live");
const liveState = document.getElementById("live-state");

function showState(isLive) {
  liveState.hidden = false;
  liveState.textContent = isLive ? liveState.dataset.on : liveState.dataset.off;
}

function replaceLive(html) {
  // What a person is using stays as it is.
  if (live.contains(document.activeElement) && document.activeElement.matches("input, select, textarea")) return;
  const open = [...live.querySelectorAll("details[open][id]")].map((one) => one.id);
  const focused = live.contains(document.activeElement) ? document.activeElement.id : "";
  live.innerHTML = html;
  for (const id of open) document.getElementById(id)?.setAttribute("open", "");
  if (focused) document.getElementById(focused)?.focus();
}

let source = null;

function connect() {
  if (source || document.hidden) return;
  const path = location.pathname + location.search;
  source = new EventSource(`${live.dataset.source}?path=${encodeURIComponent(path)}`);
  source.onopen = () => showState(true);
  source.onmessage = (event) => replaceLive(JSON.parse(event.data));
  source.addEventListener("end", () => disconnect());
  source.onerror = () => {
    showState(false);
    if (source.readyState === EventSource.CLOSED) source = null;
  };
}

function disconnect() {
  source?.close();
  source = null;
  showState(false);
}

if (live && live.dataset.live === "on" && live.childElementCount > 0) {
  connect();
  document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : connect()));
  addEventListener("pagehide", disconnect);
}

document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest?.("input, textarea, select, [contenteditable]")) return;
  const search = document.querySelector("form.search input");
  if (search) {
    event.preventDefault();
    search.focus();
    search.select();
  }
});

document.addEventListener("click", (event) => {
  const code = event.target.closest?.("[data-copy]");
  if (code && navigator.clipboard) {
    navigator.clipboard.writeText(code.textContent).then(
      () => {
        code.classList.add("copied");
        setTimeout(() => code.classList.remove("copied"), 1000);
      },
      // In a frame without the permission to write: one key copies what is selected.
      () => getSelection().selectAllChildren(code),
    );
  }
});

// The time zone of the browser, once; a person may choose another one.
if (!document.cookie.includes("rooms_time_zone=")) {
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  if (/^[A-Za-z0-9_+\-/]{1,64}$/.test(zone)) {
    const path = live.dataset.source.replace(/\/live$/, "");
    const isFramed = path !== "/console" && location.protocol === "https:";
    const site = isFramed ? "samesite=none; secure; partitioned" : "samesite=lax";
    document.cookie = `rooms_time_zone=${zone}; path=${path}; max-age=31536000; ${site}`;
  }
}

// Rooms and subscriptions: what is typed is drawn or checked by the server, a moment after the last key.
const PREVIEW_DELAY_MS = 300;

async function fetchPreview(area, form, signal) {
  const fields = new URLSearchParams(new FormData(form));
  if (area.dataset.previewMethod === "post") {
    return fetch(area.dataset.preview, { method: "POST", body: fields, signal });
  }
  const shown = new URLSearchParams();
  for (const field of area.querySelectorAll("input[name], select[name]")) shown.set(field.name, field.value);
  if (area.dataset.previewRoom) shown.set("room", area.dataset.previewRoom);
  return fetch(`${area.dataset.preview}?${shown}`, { headers: { "X-Rooms-Fragment": "live" }, signal });
}

for (const area of document.querySelectorAll("[data-preview]")) {
  const target = area.querySelector("[data-preview-target]");
  let timer = 0;
  let running = null;
  area.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(async () => {
      running?.abort();
      running = new AbortController();
      try {
        const answer = await fetchPreview(area, area.closest("form"), running.signal);
        if (answer.ok) target.innerHTML = await answer.text();
      } catch (error) {
        if (error.name !== "AbortError") target.textContent = "";
      }
    }, PREVIEW_DELAY_MS);
  });
}
