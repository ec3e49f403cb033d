// The frame around the views: which one is shown, whether the stream lives, light or dark.

import { askCredentials } from "./dialog.js";
import { h, setText } from "./dom.js";
import { fleetView } from "./fleet.js";
import { inspectorView } from "./inspector.js";
import { run, state, subscribe } from "./live.js";
import { memoryView } from "./memory.js";
import { playgroundView } from "./playground.js";
import { seriesView } from "./series.js";

const VIEWS = {
  fleet: ["Fleet", fleetView],
  prompt: ["Prompt", inspectorView],
  playground: ["Playground", playgroundView],
  series: ["Last hour", seriesView],
  memory: ["Memory", memoryView],
};

const main = document.getElementById("main");
const open = new Map();
let current = null;

function show() {
  const name = location.hash.slice(1).split("/")[0];
  // The link that skips the head of the page leads here too.
  if (name === "main") {
    main.focus();
    return;
  }
  const wanted = VIEWS[name] ? name : "fleet";
  if (wanted === current?.name) return;
  const [title, make] = VIEWS[wanted];
  if (!open.has(wanted)) open.set(wanted, make());
  current?.view.leave?.();
  current = { name: wanted, view: open.get(wanted) };
  main.replaceChildren(h("h1", { class: "title" }, title), current.view.element);
  document.title = `${title} · kvik`;
  for (const link of document.querySelectorAll(".tabs a")) {
    if (link.hash === `#${wanted}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  current.view.enter?.();
  current.view.update?.(state);
}

const LIVE = { connecting: "connecting", live: "live", lost: "reconnecting", refused: "no access" };
const live = document.getElementById("live");
const liveText = document.getElementById("live-text");
const banner = document.getElementById("banner");

function showConnection() {
  live.dataset.state = state.connection;
  setText(liveText, LIVE[state.connection]);
  if (state.connection === "refused" && banner.hidden) {
    const button = h("button", { type: "button", class: "primary", on: { click: askCredentials } }, "Enter keys");
    banner.replaceChildren(h("span", {}, `This gateway wants a key: ${state.problem}.`), button);
  }
  banner.hidden = state.connection !== "refused";
}

function theme() {
  const wanted = localStorage.getItem("kvik.theme");
  if (wanted) document.documentElement.dataset.theme = wanted;
}

document.getElementById("theme").addEventListener("click", () => {
  const isDark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  localStorage.setItem("kvik.theme", isDark ? "light" : "dark");
  theme();
  dispatchEvent(new Event("kvik-theme"));
});
document.getElementById("keys").addEventListener("click", askCredentials);

theme();
addEventListener("hashchange", show);
subscribe(() => {
  showConnection();
  current?.view.update?.(state);
});
show();
run();
