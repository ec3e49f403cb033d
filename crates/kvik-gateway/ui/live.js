// The one stream of events that the page lives on, and what is known from it.

import { events, open } from "./api.js";

const MAX_POINTS = 360;
// A stream that is silent for this long is opened again.
const MAX_SILENCE_MS = 5000;
// A page that nobody sees for this long lets the gateway rest.
const MAX_HIDDEN_MS = 30000;

export const state = {
  fleet: null,
  points: [],
  // `connecting`, `live`, `lost`, `refused`
  connection: "connecting",
  problem: "",
};

const listeners = new Set();

/** Calls `listener` after each change; gives a function that ends that. */
export function subscribe(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

let isAnnounced = false;

function announce() {
  if (isAnnounced) return;
  isAnnounced = true;
  requestAnimationFrame(() => {
    isAnnounced = false;
    for (const listener of listeners) listener(state);
  });
}

function become(connection, problem = "") {
  state.connection = connection;
  state.problem = problem;
  announce();
}

async function follow(controller) {
  let silence;
  const hear = () => {
    clearTimeout(silence);
    silence = setTimeout(() => controller.abort(), MAX_SILENCE_MS);
  };
  hear();
  try {
    const response = await open("ui/events", { signal: controller.signal });
    let isFirst = true;
    for await (const data of events(response)) {
      hear();
      const event = JSON.parse(data);
      state.fleet = event.fleet;
      if (isFirst) state.points = event.points;
      else state.points.push(...event.points);
      if (state.points.length > MAX_POINTS) state.points = state.points.slice(-MAX_POINTS);
      isFirst = false;
      become("live");
    }
  } finally {
    clearTimeout(silence);
  }
}

/** Keeps a stream open for as long as the page is there. */
export async function run() {
  let controller = new AbortController();
  let pauseMs = 300;
  let wake = () => {};
  let hiding;
  addEventListener("kvik-credentials", () => {
    controller.abort();
    wake();
  });
  document.addEventListener("visibilitychange", () => {
    clearTimeout(hiding);
    if (document.hidden) hiding = setTimeout(() => controller.abort(), MAX_HIDDEN_MS);
    else wake();
  });
  for (;;) {
    controller = new AbortController();
    const began = Date.now();
    try {
      await follow(controller);
      become("connecting");
    } catch (error) {
      if (error.status === 401 || error.status === 403) become("refused", error.message);
      else become("lost", error.status === undefined ? "" : error.message);
    }
    pauseMs = Date.now() - began > 5000 ? 300 : Math.min(5000, pauseMs * 2);
    await new Promise((resolve) => {
      wake = resolve;
      if (state.connection !== "refused" && !document.hidden) setTimeout(resolve, pauseMs);
    });
  }
}
