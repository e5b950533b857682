// The page: receives the address's #view and the event stream, hands both on to the views.

import * as api from "./api.js";
import { text } from "./dom.js";
import * as now from "./now.js";

const $ = (id) => document.getElementById(id);
const VIEWS = ["now", "roofline", "ladder", "choreography", "try"];
const LOADERS = {
  now: async () => now,
  roofline: () => import("./roofline.js"),
  ladder: () => import("./ladder.js"),
  choreography: () => import("./choreography.js"),
  try: () => import("./try.js"),
};
const views = {};
let current = null;
let last = null;
let retry = 500;
let stream = null;

async function show(name, { focus = false } = {}) {
  if (!VIEWS.includes(name)) name = "now";
  if (current && current !== name) views[current]?.leave?.();
  current = name;
  for (const each of VIEWS) $(`view-${each}`).hidden = each !== name;
  for (const link of $("views").children) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const title = $(`title-${name}`).textContent;
  document.title = `${title} · GEMM service`;
  if (!views[name]) {
    const module = await LOADERS[name]();
    views[name] ??= module.view($(`view-${name}`));
  }
  if (current !== name) return;
  views[name].enter?.();
  if (last) views[name].update?.(last);
  if (focus) $("main").focus({ preventScroll: true });
}

function status(words, kind) {
  const pill = $("status");
  text(pill, words);
  pill.dataset.kind = kind;
}

function received(document_) {
  last = document_;
  retry = 500;
  status(document_.status, document_.status === "ready" ? "good" : "warn");
  const device = document_.workers.find((each) => each.device)?.device;
  text($("device"), device ? `${device.name} · ${document_.workers.length} worker${document_.workers.length > 1 ? "s" : ""}` : "");
  views[current]?.update?.(document_);
}

async function watch() {
  stream?.abort();
  const mine = (stream = new AbortController());
  while (!mine.signal.aborted) {
    try {
      await api.events("/now/events", received, mine.signal);
      status("ended; connecting again", "warn");
    } catch (error) {
      if (mine.signal.aborted) return;
      if (error.status === 401 || error.status === 403) {
        status(api.hasKey() ? "the key isn't taken" : "needs a key", "bad");
        if (!$("key-dialog").open) openKey(error.message);
        return;
      }
      status("not connected", "bad");
    }
    await new Promise((done) => setTimeout(done, retry));
    retry = Math.min(8000, retry * 2);
  }
}

function openKey(why) {
  if (why) text($("key-why"), `${why}. The key is kept in this tab's memory only, and sent to this service only.`);
  $("key-dialog").showModal();
}

function keys() {
  $("key-open").addEventListener("click", () => openKey());
  $("key-form").addEventListener("submit", () => {
    const value = $("key").value.trim();
    $("key").value = "";
    if (value) api.setKey(value);
  });
  $("key-forget").addEventListener("click", () => {
    $("key").value = "";
    api.setKey(null);
    $("key-dialog").close();
  });
  api.onKey(() => {
    watch();
    views[current]?.enter?.();
  });
}

function theme() {
  const button = $("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try { chosen = localStorage.getItem("theme"); } catch { /* storage may be off */ }
  const paint = () => {
    const dark = chosen ? chosen === "dark" : system.matches;
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    button.setAttribute("aria-pressed", String(dark));
  };
  button.addEventListener("click", () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("theme", chosen); } catch { /* then it holds for this visit */ }
    paint();
  });
  system.addEventListener("change", paint);
  paint();
}

theme();
keys();
// A jump within the page: as a hash it would be taken for a view.
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  $("main").focus();
});
addEventListener("hashchange", () => show(location.hash.slice(1), { focus: true }));
show(location.hash.slice(1));
watch();
