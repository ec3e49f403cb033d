// The fleet: every worker with its state, load and tiers, and what happens right now.

import { changes } from "./activity.js";
import { bar, h, setClass, setText } from "./dom.js";
import { bytes, byTier, clock, count, percent, seconds, sum, tierKind, tierName } from "./format.js";
import { openWorker } from "./worker.js";

const MAX_CHANGES = 60;
// A worker that left stays on the page for a while, so that its end is seen.
const GONE_MS = 20000;
// From this many workers on, cards show the essential only.
const MANY = 24;
const BY_NAME = new Intl.Collator(undefined, { numeric: true });

function tile(label) {
  const value = h("dd", {}, "–");
  const note = h("dd", { class: "note" });
  return { element: h("div", { class: "tile" }, h("dt", {}, label), value, note), value, note };
}

function tierRow(tier) {
  const meter = bar(`${tierName(tier)} used`, tierKind(tier));
  const text = h("span", { class: "amount" });
  const element = h("div", { class: "tier" }, h("span", { class: "name" }, tierName(tier)), meter.element, text);
  return {
    element,
    set(gauges) {
      meter.set(gauges.capacity_bytes > 0 ? gauges.used_bytes / gauges.capacity_bytes : 0);
      const limit = gauges.capacity_bytes > 0 ? ` of ${bytes(gauges.capacity_bytes)}` : "";
      setText(text, gauges.is_up ? `${bytes(gauges.used_bytes)}${limit}` : "down");
      setClass(element, "bad", !gauges.is_up);
    },
  };
}

function flows(worker) {
  const { rates } = worker;
  if (!rates) return [];
  const found = [];
  for (const [tier, value] of byTier(rates.cached_tokens)) {
    if (value > 0 && tierName(tier) !== "engine") found.push([tier, `from ${tierName(tier)} ${count(value)} tok/s`]);
  }
  for (const [tier, value] of byTier(rates.read_bytes)) if (value > 0) found.push([tier, `read ${tierName(tier)} ${bytes(value)}/s`]);
  for (const [tier, value] of byTier(rates.written_bytes)) if (value > 0) found.push([tier, `write ${tierName(tier)} ${bytes(value)}/s`]);
  for (const [tier, value] of byTier(rates.evicted_chunks)) if (value > 0) found.push([tier, `evict ${tierName(tier)} ${count(value)}/s`]);
  if (rates.evicted_blocks > 0) found.push(["engine", `evict engine ${count(rates.evicted_blocks)} blocks/s`]);
  if (rates.moved_out > 0) found.push(["peer", "moves away"]);
  if (rates.moved_in > 0) found.push(["peer", "takes over"]);
  return found;
}

function card(id) {
  const name = h("button", { type: "button", class: "name", on: { click: () => openWorker(id) } }, id);
  const badge = h("span", { class: "state" });
  const role = h("span", { class: "role" });
  const model = h("p", { class: "model" });
  const kv = bar("KV blocks in the engine", "engine");
  const kvText = h("span", { class: "amount" });
  const tiers = new Map();
  const tierList = h("div", { class: "tiers" }, h("div", { class: "tier" }, h("span", { class: "name" }, "engine"), kv.element, kvText));
  const load = h("span", {});
  const known = h("span", { class: "known" });
  const rates = h("p", { class: "rates" });
  const flowList = h("ul", { class: "flows", "aria-label": "Moves now" });
  const element = h(
    "li",
    { class: "card", "data-worker": id },
    h("div", { class: "head" }, h("span", { class: "dot", "aria-hidden": "true" }), name, role, badge),
    model,
    tierList,
    h("p", { class: "load" }, load, known),
    rates,
    flowList,
  );
  let shownFlows = "";
  return {
    element,
    goneAt: 0,
    /** Shows a worker; `isBrief` leaves out what cards of a large fleet do not show. */
    set(worker, isBrief) {
      const { gauges } = worker;
      element.dataset.state = worker.state;
      setText(badge, worker.state);
      setText(role, worker.role === "both" ? "" : worker.role);
      setText(model, worker.models.join(", ") + (worker.kind === "engine" ? " · other engine" : ""));
      // Other engines tell only what running sequences hold.
      const tellsBlocks = gauges?.kv_blocks > 0;
      kv.set(tellsBlocks ? gauges.kv_blocks_cached / gauges.kv_blocks : (gauges?.kv_usage ?? 0));
      setText(kvText, !gauges ? "–" : tellsBlocks ? `${count(gauges.kv_blocks_cached)} of ${count(gauges.kv_blocks)} blocks` : `${percent(gauges.kv_usage)} held`);
      setText(load, gauges ? `${count(gauges.running)} running · ${count(gauges.waiting)} waiting` : "no figures");
      if (isBrief) return;
      for (const [tier, tierGauges] of byTier(gauges?.tiers)) {
        if (!tiers.has(tier)) {
          tiers.set(tier, tierRow(tier));
          tierList.append(tiers.get(tier).element);
        }
        tiers.get(tier).set(tierGauges);
      }
      setText(known, worker.index_blocks === null ? "" : ` · ${count(worker.index_blocks)} blocks known`);
      const now = worker.rates;
      if (now) {
        const hit = now.prompt_tokens > 0 ? ` · ${percent(sum(now.cached_tokens) / now.prompt_tokens)} cached` : "";
        setText(rates, `${count(now.prompt_tokens)} tok/s in${hit} · ${count(now.generated_tokens)} tok/s out`);
      } else {
        setText(rates, "");
      }
      const moving = flows(worker);
      const text = moving.map(([, flow]) => flow).join("|");
      if (text !== shownFlows) {
        shownFlows = text;
        flowList.replaceChildren(...moving.map(([tier, flow]) => h("li", { class: tierKind(tier) }, flow)));
      }
    },
    leave() {
      element.dataset.state = "gone";
      setText(badge, "gone");
      setText(rates, "");
      flowList.replaceChildren();
    },
  };
}

export function fleetView() {
  const tiles = {
    workers: tile("Workers"),
    requests: tile("Requests"),
    first: tile("First token"),
    hits: tile("Served from cache"),
    queue: tile("Queue"),
    moved: tile("Moved now"),
  };
  const cards = new Map();
  const grid = h("ul", { class: "cards", "aria-label": "Workers" });
  const filter = h("input", { type: "search", placeholder: "Filter by name, model or state", "aria-label": "Filter workers", on: { input: sift } });
  const filterBox = h("div", { class: "filter", hidden: true }, filter);
  const feed = h("ol", { class: "feed", "aria-label": "What happens now" });
  const empty = h("p", { class: "empty" }, "Waiting for the first figures of the fleet.");
  const calm = h("p", { class: "empty" }, "Nothing moves. Send a prompt in the playground.");
  const element = h(
    "div",
    { class: "fleet" },
    h("dl", { class: "tiles" }, Object.values(tiles).map((each) => each.element)),
    h(
      "div",
      { class: "split" },
      h("section", { "aria-label": "Workers" }, filterBox, empty, grid),
      h("section", { class: "now", "aria-labelledby": "now" }, h("h2", { id: "now" }, "Right now"), calm, feed),
    ),
  );
  let last = null;

  function sift() {
    const wanted = filter.value.trim().toLowerCase();
    for (const worker of last?.workers ?? []) {
      const text = [worker.id, worker.state, worker.role, ...worker.models].join(" ").toLowerCase();
      const found = cards.get(worker.id);
      if (found) found.element.hidden = !text.includes(wanted);
    }
  }

  function showTiles({ fleet, points }) {
    const { gateway, workers } = fleet;
    const ready = workers.filter((worker) => worker.state === "ready").length;
    setText(tiles.workers.value, `${count(ready)} of ${count(workers.length)}`);
    setText(tiles.workers.note, gateway.is_coordinator_connected || workers.every((worker) => worker.kind === "engine") ? "ready" : "ready, no coordinator");
    setText(tiles.requests.value, `${count(gateway.requests_per_s)}/s`);
    setText(tiles.requests.note, `${count(gateway.outstanding_requests)} open, ${count(gateway.failed_per_s)}/s failed`);
    setText(tiles.first.value, seconds(gateway.ttft_p50_s));
    setText(tiles.first.note, gateway.ttft_p95_s === null ? "no stream lately" : `95 % within ${seconds(gateway.ttft_p95_s)}`);
    const minute = points.slice(-6);
    const prompts = minute.reduce((total, point) => total + point.prompt_tokens, 0);
    const cached = minute.reduce((total, point) => total + sum(point.cached_tokens), 0);
    setText(tiles.hits.value, prompts > 0 ? percent(cached / prompts) : "–");
    setText(tiles.hits.note, prompts > 0 ? `of ${count(prompts)} tokens` : "no prompt lately");
    const waiting = workers.reduce((total, worker) => total + (worker.gauges?.waiting ?? 0), 0);
    setText(tiles.queue.value, count(gateway.queue_length + waiting));
    setText(tiles.queue.note, `${count(gateway.queue_length)} gateway, ${count(waiting)} workers`);
    const moved = workers.reduce((total, worker) => total + sum(worker.rates?.read_bytes) + sum(worker.rates?.written_bytes), 0);
    setText(tiles.moved.value, `${bytes(moved)}/s`);
    setText(tiles.moved.note, "between tiers");
  }

  function showCards({ workers }, now) {
    const present = new Set();
    let isNew = false;
    for (const worker of workers) {
      present.add(worker.id);
      if (!cards.has(worker.id)) {
        cards.set(worker.id, card(worker.id));
        isNew = true;
      }
      const each = cards.get(worker.id);
      each.goneAt = 0;
      each.set(worker, workers.length > MANY);
    }
    for (const [id, each] of cards) {
      if (present.has(id)) continue;
      if (each.goneAt === 0) {
        each.goneAt = now;
        each.leave();
      } else if (now - each.goneAt > GONE_MS) {
        each.element.remove();
        cards.delete(id);
      }
    }
    if (grid.children.length !== cards.size || isNew) {
      const order = [...cards.keys()].sort(BY_NAME.compare);
      grid.append(...order.map((id) => cards.get(id).element));
    }
    setClass(grid, "many", cards.size > MANY);
    filterBox.hidden = cards.size <= MANY;
    empty.hidden = cards.size > 0;
    if (cards.size === 0) setText(empty, "No worker is known yet. Workers register at a coordinator; other engines are listed as backends.");
  }

  function showFeed(found, timeMs) {
    for (const { worker, text, tier, kind } of found.slice(-MAX_CHANGES)) {
      const mark = h("span", { class: `mark ${tier ? tierKind(tier) : (kind ?? "")}`, "aria-hidden": "true" });
      feed.prepend(h("li", {}, h("time", {}, clock(timeMs)), mark, h("span", {}, h("b", {}, worker), ` ${text}`)));
    }
    while (feed.children.length > MAX_CHANGES) feed.lastElementChild.remove();
    calm.hidden = feed.children.length > 0;
  }

  return {
    element,
    update(state) {
      const { fleet } = state;
      if (!fleet || fleet === last) return;
      showTiles(state);
      showCards(fleet, Date.now());
      showFeed(changes(last, fleet), fleet.time_ms);
      last = fleet;
      if (filter.value) sift();
    },
  };
}
