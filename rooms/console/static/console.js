// Makes pages live and quick to use. Every page works without it.

const live = document.getElementById("live");
const liveState = document.getElementById("live-state");
const connection = document.getElementById("connection");

// On a phone a row of a table is shown as a card, in which each cell has the name of its column.
function nameCells(part) {
  for (const table of part.querySelectorAll(".scroll table")) {
    // Its own rows only: a cell may have a table in it, with columns of its own.
    const names = [...(table.tHead?.rows ?? [])].flatMap((row) => [...row.cells]).map((one) => one.textContent.trim());
    if (names.length === 0) continue;
    for (const row of [...table.tBodies].flatMap((body) => [...body.rows])) {
      [...row.cells].forEach((cell, index) => {
        if (index > 0 || cell.matches(".num") || cell.firstElementChild?.matches("input")) cell.dataset.label = names[index] ?? "";
        const isBare = ["", "–"].includes(cell.textContent.trim()) && !cell.querySelector("input, svg");
        cell.classList.toggle("bare", isBare);
      });
    }
    table.classList.add("cards");
  }
}

nameCells(document);
for (const here of document.querySelectorAll("nav a[aria-current]")) {
  here.parentElement.scrollLeft = here.offsetLeft - here.parentElement.offsetLeft - 16;
}

// What an element is, so that it is found again in the next state of the page.
function identity(element) {
  if (element.id) return `#${element.id}`;
  if (element.matches("summary")) return `summary ${element.parentElement.id}`;
  const target = element.getAttribute("href") ?? element.form?.action ?? element.getAttribute("aria-label") ?? "";
  return `${element.tagName} ${target} ${element.textContent.trim().slice(0, 100)}`;
}

function alike(element) {
  const name = identity(element);
  return [...live.querySelectorAll(element.tagName)].filter((one) => identity(one) === name);
}

let isPressed = false;
addEventListener("pointerdown", () => (isPressed = true), true);
for (const end of ["pointerup", "pointercancel"]) addEventListener(end, () => (isPressed = false), true);

function isInUse() {
  if (isPressed) return true;
  const selection = getSelection();
  if (selection && !selection.isCollapsed && live.contains(selection.anchorNode)) return true;
  return live.contains(document.activeElement) && document.activeElement.matches("input, select, textarea");
}

let pending = null;

function replaceLive() {
  // What a person is using stays as it is, until the next beat; what is seen stays in its place.
  if (pending === null || isInUse()) return;
  const open = [...live.querySelectorAll("details[open][id]")].map((one) => one.id);
  const scrolled = [...live.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
  const focused = live.contains(document.activeElement) ? document.activeElement : null;
  const number = focused ? alike(focused).indexOf(focused) : -1;
  live.innerHTML = pending;
  pending = null;
  nameCells(live);
  for (const id of open) document.getElementById(id)?.setAttribute("open", "");
  live.querySelectorAll(".scroll").forEach((one, index) => (one.scrollLeft = scrolled[index] ?? 0));
  if (focused) {
    const found = alike(focused);
    found[Math.min(number, found.length - 1)]?.focus({ preventScroll: true });
  }
}

// Four beats of the server, which sends one at least every five seconds.
const SILENT_MS = 20000;
// Until the server has accepted the stream: one that does is quick.
const CONNECTING_MS = 3000;
const FIRST_RETRY_MS = 1000;
const MAX_RETRY_MS = 15000;
let source = null;
let heardAt = Date.now();
let connectedAt = 0;
let retryMs = FIRST_RETRY_MS;
let retryTimer = 0;
let isOver = false;

function showState(isLive, text = null) {
  liveState.hidden = false;
  liveState.textContent = isLive ? liveState.dataset.on : liveState.dataset.off;
  live.classList.toggle("stale", !isLive);
  connection.hidden = isLive;
  if (isLive) return;
  const zone = { timeZone: connection.dataset.zone, hourCycle: "h23", timeStyle: "medium" };
  const since = new Date(heardAt).toLocaleTimeString(document.documentElement.lang, zone);
  const said = text.replace("{time}", since);
  // Read aloud once, not at every attempt.
  if (connection.textContent !== said) connection.textContent = said;
}

function hear() {
  heardAt = Date.now();
  showState(true);
  replaceLive();
}

function connect() {
  if (source || document.hidden) return;
  clearTimeout(retryTimer);
  connectedAt = Date.now();
  const path = location.pathname + location.search;
  source = new EventSource(`${live.dataset.source}?path=${encodeURIComponent(path)}`);
  source.onopen = hear;
  source.onmessage = (event) => {
    pending = JSON.parse(event.data);
    retryMs = FIRST_RETRY_MS;
    hear();
  };
  source.addEventListener("same", hear);
  // Its own attempts end where a proxy answers for the service.
  for (const end of ["end", "error"]) source.addEventListener(end, reconnectLater);
}

function disconnect() {
  source?.close();
  source = null;
  clearTimeout(retryTimer);
}

function reconnectLater() {
  disconnect();
  retryTimer = setTimeout(reconnect, retryMs);
  retryMs = Math.min(2 * retryMs, MAX_RETRY_MS);
}

// Ask for the page before its stream, whose errors do not say whether the service is there.
async function reconnect() {
  const asked = { headers: { "X-Rooms-Fragment": "live" }, redirect: "manual", signal: AbortSignal.timeout(SILENT_MS) };
  const answer = await fetch(location.href, asked).catch(() => null);
  if (source || document.hidden) return;
  if (answer?.ok) {
    connect();
  } else if (answer && answer.status < 500 && answer.status !== 429) {
    isOver = true;
    showState(false, connection.dataset.ended);
  } else {
    showState(false, connection.dataset.lost);
    reconnectLater();
  }
}

// No error is reported where the network is gone, or while this machine slept.
function checkSilence() {
  const isOpen = source?.readyState === EventSource.OPEN;
  const silentMs = Date.now() - Math.max(heardAt, connectedAt);
  if (document.hidden || isOver || silentMs <= (isOpen ? SILENT_MS : CONNECTING_MS)) return;
  showState(false, connection.dataset.lost);
  if (source && silentMs > SILENT_MS) reconnectLater();
}

if (live && live.dataset.live === "on" && live.childElementCount > 0) {
  connect();
  document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : connect()));
  addEventListener("pagehide", disconnect);
  setInterval(checkSilence, 1000);
}

const menu = document.querySelector("details.menu");
document.addEventListener("click", (event) => {
  if (menu?.open && !menu.contains(event.target)) menu.open = false;
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && menu?.open) {
    menu.open = false;
    menu.querySelector("summary").focus();
    return;
  }
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest?.("input, textarea, select, [contenteditable]")) return;
  const search = document.querySelector("form.search input");
  if (search) {
    event.preventDefault();
    search.focus();
    search.select();
  }
});

for (const button of document.querySelectorAll("[data-copies]")) button.hidden = !navigator.clipboard;

document.addEventListener("click", (event) => {
  const target = event.target.closest?.("[data-copy], [data-copies]");
  const code = target?.matches("[data-copies]") ? target.previousElementSibling : target;
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

// A browser cannot lead to a wrong field that is folded.
document.addEventListener("invalid", (event) => event.target.closest("details")?.setAttribute("open", ""), true);
