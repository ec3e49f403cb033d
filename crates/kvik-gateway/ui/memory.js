// Memory that engines on one machine share: limits, weights and what is held.

import { get, post, worker as path } from "./api.js";
import { ask, field } from "./dialog.js";
import { bar, h, setText, toast } from "./dom.js";
import { bytes, count, plural } from "./format.js";
import { state } from "./live.js";

const REFRESH_MS = 2000;
const MAX_ASKED = 32;
const MIB = 1 << 20;

function host(address) {
  try {
    return new URL(address).hostname;
  } catch {
    return address;
  }
}

/** A worker of each machine: all workers of one machine see the same ledgers. */
function speakers() {
  const found = new Map();
  for (const worker of state.fleet?.workers ?? []) {
    const name = host(worker.address);
    if (worker.kind === "worker" && worker.gauges && !found.has(name)) found.set(name, worker.id);
  }
  return [...found].slice(0, MAX_ASKED);
}

function change(speaker, device, group) {
  const { policy } = group;
  const mib = (value) => (value === null ? "" : String(Math.round(value / MIB)));
  const number = (value, min, max) => h("input", { type: "number", min, max, value });
  const limit = number(mib(policy.max_bytes), 2);
  const min = number(mib(policy.min_bytes), 0);
  const weight = number(policy.weight, 1, 1000000);
  const priority = number(policy.priority, 0, 1000000);
  return ask({
    title: `What ${group.ipc} may hold on ${device}`,
    content: h(
      "div",
      {},
      field("Limit in MiB", limit, "Empty: all that the device has. Engines above it are asked to give memory back."),
      field("Minimum in MiB", min, "Kept for it, whatever others want."),
      field("Weight", weight, "Its share among groups of the same priority."),
      field("Priority", priority, "Higher ones are served first."),
    ),
    confirm: "Change",
    submit: async () => {
      await post(path(speaker, "memory/policy"), {
        device,
        ipc: group.ipc,
        policy: {
          max_bytes: limit.value === "" ? null : Number(limit.value) * MIB,
          min_bytes: Number(min.value) * MIB,
          weight: Number(weight.value),
          priority: Number(priority.value),
        },
      });
      toast(`${group.ipc}: changed`);
    },
  });
}

function trim(speaker, device, group) {
  return ask({
    title: `Have ${group.ipc} give back free pages?`,
    content: h("p", {}, `Its engines give back the ${bytes(group.parked_bytes)} that they hold without using them. The next request may wait for memory a moment longer.`),
    confirm: "Trim",
    submit: async () => {
      const { engines } = await post(path(speaker, "memory/trim"), { device, ipc: group.ipc });
      toast(`${group.ipc}: ${plural(engines, "engine", "engines")} asked`);
    },
  });
}

function groupCard(speaker, device, group) {
  const used = bar(`Held by ${group.ipc}`, "ram");
  used.set(group.limit_bytes > 0 ? group.held_bytes / group.limit_bytes : 0);
  const notes = [];
  if (group.over_limit_bytes > 0) notes.push(`${bytes(group.over_limit_bytes)} above the limit`);
  if (group.wanted_bytes > 0) notes.push(`waits for ${bytes(group.wanted_bytes)}`);
  return h(
    "li",
    { class: "card" },
    h("div", { class: "head" }, h("b", {}, group.ipc), h("span", { class: "role" }, `weight ${count(group.policy.weight)} · priority ${count(group.policy.priority)}`)),
    h("div", { class: "tiers" }, h("div", { class: "tier" }, h("span", { class: "name" }, "held"), used.element, h("span", { class: "amount" }, `${bytes(group.held_bytes)} of ${bytes(group.limit_bytes)}`))),
    h("p", { class: "load" }, `${bytes(group.used_bytes)} in use · ${bytes(group.parked_bytes)} free to give back · ${bytes(group.entitled_bytes)} its fair share`),
    notes.length > 0 ? h("p", { class: "problem" }, notes.join(", ")) : null,
    h(
      "ul",
      { class: "members" },
      group.members.map((member) => h("li", {}, `${member.label || "engine"}, process ${member.pid}: ${bytes(member.held_bytes)}${member.is_live ? "" : ", dead"}`)),
      group.members.length === 0 ? h("li", {}, "no engine") : null,
    ),
    h(
      "div",
      { class: "buttons start" },
      h("button", { type: "button", on: { click: () => change(speaker, device, group) } }, "Change"),
      h("button", { type: "button", disabled: group.parked_bytes === 0, on: { click: () => trim(speaker, device, group) } }, "Trim"),
    ),
  );
}

function deviceSection(name, speaker, device) {
  const parts = device.groups.map((group, place) => h("span", { class: ["engine", "ram", "nvme", "peer", "remote"][place % 5], style: { "flex-grow": group.held_bytes }, title: `${group.ipc}: ${bytes(group.held_bytes)}` }));
  return h(
    "section",
    { class: "sheet" },
    h("h2", {}, `${device.device} on ${name}`),
    h("p", { class: "hint" }, `${bytes(device.granted_bytes)} of ${bytes(device.budget_bytes)} granted, ${bytes(device.free_bytes)} free`),
    h("div", { class: "strip tall", role: "img", "aria-label": `${bytes(device.granted_bytes)} of ${bytes(device.budget_bytes)} granted` }, parts, h("span", { class: "none", style: { "flex-grow": device.free_bytes } })),
    h("ul", { class: "cards" }, device.groups.map((group) => groupCard(speaker, device.device, group))),
  );
}

export function memoryView() {
  const note = h("p", { class: "empty" }, "Asking the machines.");
  const list = h("div", {});
  const element = h("div", { class: "memory" }, note, list);
  let timer;
  let shown = "";
  let hasAsked = false;

  async function refresh() {
    if (!state.fleet) return;
    hasAsked = true;
    const found = await Promise.all(
      speakers().map(async ([name, id]) => {
        try {
          return { name, id, devices: (await get(path(id, "memory"))).devices };
        } catch (error) {
          return { name, id, devices: [], problem: error.message };
        }
      }),
    );
    const text = JSON.stringify(found);
    // A focus inside must not be lost for nothing.
    if (text !== shown) {
      shown = text;
      const focused = document.activeElement?.closest?.(".memory .card")?.querySelector("b")?.textContent;
      list.replaceChildren(...found.flatMap(({ name, id, devices }) => devices.map((device) => deviceSection(name, id, device))));
      if (focused) [...list.querySelectorAll(".card")].find((card) => card.querySelector("b")?.textContent === focused)?.querySelector("button")?.focus();
    }
    const problem = found.find((each) => each.problem)?.problem;
    note.hidden = list.children.length > 0 && !problem;
    setText(note, problem ?? (found.length === 0 ? "No worker answers." : "No engine on these machines shares memory. Set memory.enabled of workers, or start engines with kvcached's variables."));
  }

  return {
    element,
    enter() {
      refresh();
      timer = setInterval(refresh, REFRESH_MS);
    },
    leave: () => clearInterval(timer),
    update: () => hasAsked || refresh(),
  };
}
