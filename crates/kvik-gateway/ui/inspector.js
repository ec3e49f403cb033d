// A prompt under the lens: its token blocks, the workers that hold them, and where it would go.

import { post, worker as path } from "./api.js";
import { blockMap, drawLine, tiersOfBlocks } from "./blocks.js";
import { ask } from "./dialog.js";
import { h, setText, toast } from "./dom.js";
import { byTier, count, percent, plural, sum, tierKind, tierName } from "./format.js";
import { state } from "./live.js";

const PAUSE_MS = 450;
const MAX_ROWS = 400;

const REASONS = {
  owner: "the prompt's beginning belongs to it on the ring",
  bound: "the owner on the ring has as much work as it may",
  unusable: "the owner on the ring takes no requests",
  least_loaded: "all workers are full, and it has the least work",
  holder: "it holds the most of the prompt for the work it has",
  spread: "no worker with KV has room, and it is the cheapest",
};

function sentence(explained, held) {
  const { worker, reason, prompt_tokens: tokens } = explained;
  if (!worker) return "No worker can take this prompt now.";
  const cached = Math.min(sum(held[worker]), tokens);
  const rest = tokens - cached;
  const found = cached > 0 ? `It has ${count(cached)} of ${count(tokens)} tokens; ${count(rest)} would be computed.` : `All ${count(tokens)} tokens would be computed.`;
  const unasked = cached > 0 && !explained.is_exact ? " The index did not answer in time to be counted." : "";
  return `${worker} would answer: ${REASONS[reason] ?? reason}. ${found}${unasked}`;
}

/** Tokens by tier that count: those from the first on without a gap. */
function prefixByTier(runs) {
  const found = {};
  let end = 0;
  for (const { first_token: first, tokens, tier } of runs ?? []) {
    if (first !== end) break;
    found[tier] = (found[tier] ?? 0) + tokens;
    end = first + tokens;
  }
  return found;
}

export function inspectorView() {
  const model = h("select", { "aria-label": "Model", on: { change: () => soon() } });
  const salt = h("input", { type: "text", maxlength: 1024, placeholder: "none", on: { input: () => soon() } });
  const prompt = h("textarea", { rows: 7, spellcheck: "false", placeholder: "Paste a prompt. Nothing is sent to a worker to answer.", "aria-label": "Prompt", on: { input: () => soon() } });
  const summary = h("p", { class: "verdict", role: "status" });
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const canvas = h("canvas", { class: "map", tabindex: 0, role: "img", "aria-label": "Blocks of the prompt" });
  const map = blockMap(canvas);
  const detail = h("p", { class: "detail", "aria-live": "polite" });
  const legend = h(
    "ul",
    { class: "legend" },
    [["engine", "engine"], ["ram", "ram"], ["nvme", "nvme"], ["remote", "remote"], ["elsewhere", "another worker only"], ["none", "would be computed"]].map(([kind, name]) =>
      h("li", {}, h("span", { class: `mark ${kind}`, "aria-hidden": "true" }), name),
    ),
  );
  const body = h("tbody");
  const table = h(
    "table",
    {},
    h("thead", {}, h("tr", {}, ["Worker", "Holds", "Tokens held", "Score", "Outstanding", "Cost"].map((name, place) => h("th", { scope: "col", class: place > 1 ? "number" : null }, name)))),
    body,
  );
  const actions = h(
    "div",
    { class: "buttons start" },
    h("button", { type: "button", on: { click: () => act("pin") } }, "Pin it"),
    h("button", { type: "button", on: { click: () => act("unpin") } }, "Unpin it"),
    h("button", { type: "button", class: "danger", on: { click: () => act("clear") } }, "Clear it"),
  );
  const shownOf = h("h2", {});
  const result = h(
    "div",
    { hidden: true },
    h("section", { class: "sheet" }, shownOf, legend, canvas, detail, actions),
    h("section", { class: "sheet" }, h("h2", {}, "Workers"), h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Workers and their parts of the prompt" }, table)),
  );
  const element = h(
    "div",
    { class: "inspector" },
    h("section", { class: "sheet" }, h("div", { class: "controls" }, h("label", { class: "inline" }, "Model ", model), h("label", { class: "inline" }, "Cache salt ", salt)), prompt, summary, problem),
    result,
  );

  let timer;
  let controller = new AbortController();
  let found = null;
  let chosen = null;
  const texts = new Map();

  function soon() {
    clearTimeout(timer);
    timer = setTimeout(look, PAUSE_MS);
  }

  async function look() {
    controller.abort();
    controller = new AbortController();
    const { signal } = controller;
    if (!prompt.value || !model.value) {
      result.hidden = true;
      setText(summary, "");
      return;
    }
    const question = { model: model.value, prompt: prompt.value, ...(salt.value ? { cache_salt: salt.value } : {}) };
    try {
      // One after the other: the choice of a worker has little time for the index, as that of a real request.
      const holders = await post("index/prompt", question, signal);
      const explained = await post("route/explain", question, signal);
      const scores = await post("v1/score", question, signal);
      found = { holders, explained, scores };
      texts.clear();
      problem.hidden = true;
      chosen = explained.candidates.some((candidate) => candidate.worker === chosen) ? chosen : explained.worker;
      show();
    } catch (error) {
      if (error.name === "AbortError") return;
      problem.textContent = error.message;
      problem.hidden = false;
      result.hidden = true;
      setText(summary, "");
    }
  }

  const nBlocks = () => Math.floor(found.holders.token_ids.length / found.holders.block_tokens);

  function show() {
    const { holders, explained } = found;
    const held = Object.fromEntries(Object.entries(holders.workers).map(([worker, runs]) => [worker, prefixByTier(runs)]));
    explained.prompt_tokens = holders.token_ids.length;
    setText(summary, sentence(explained, held));
    result.hidden = false;
    showRows(held);
    select(chosen ?? explained.candidates[0]?.worker ?? null);
  }

  function showRows(held) {
    const { holders, explained, scores } = found;
    const nTokens = holders.token_ids.length;
    const weight = ({ worker }) => -sum(held[worker]);
    const rows = [...explained.candidates].sort((one, other) => weight(one) - weight(other) || one.cost - other.cost).slice(0, MAX_ROWS);
    const canvases = [];
    body.replaceChildren(
      ...rows.map((candidate) => {
        const { worker } = candidate;
        const line = h("canvas", { class: "line", "aria-hidden": "true" });
        canvases.push([line, holders.workers[worker]]);
        const tiers = byTier(held[worker]).map(([tier, tokens]) => h("span", { class: "chip" }, h("span", { class: `mark ${tierKind(tier)}`, "aria-hidden": "true" }), `${tierName(tier)} ${count(tokens)}`));
        const isChosen = worker === explained.worker;
        return h(
          "tr",
          { "data-worker": worker, class: isChosen ? "chosen" : null },
          h("th", { scope: "row" }, h("button", { type: "button", class: "link", on: { click: () => select(worker) } }, worker), isChosen ? h("span", { class: "state" }, "chosen") : null, candidate.is_usable ? null : h("span", { class: "state bad" }, "unusable")),
          h("td", { class: "wide" }, line, h("div", { class: "chips" }, tiers)),
          h("td", { class: "number" }, `${count(sum(held[worker]))} (${percent(sum(held[worker]) / Math.max(1, nTokens))})`),
          h("td", { class: "number" }, count(scores.scores[worker] ?? 0)),
          h("td", { class: "number" }, count(candidate.outstanding_tokens)),
          h("td", { class: "number" }, count(candidate.cost)),
        );
      }),
    );
    for (const [line, runs] of canvases) drawLine(line, runs, Math.max(1, nTokens));
  }

  function select(worker) {
    chosen = worker;
    for (const row of body.children) row.toggleAttribute("aria-selected", row.dataset.worker === worker);
    for (const row of body.children) if (row.dataset.worker === worker) row.setAttribute("aria-selected", "true");
    const { holders } = found;
    const mine = tiersOfBlocks(holders.workers[worker], nBlocks(), holders.block_tokens);
    const others = new Array(nBlocks()).fill(false);
    for (const [other, runs] of Object.entries(holders.workers)) {
      if (other === worker) continue;
      for (const { first_token: first, tokens } of runs) others.fill(true, Math.floor(first / holders.block_tokens), Math.floor((first + tokens) / holders.block_tokens));
    }
    const rest = holders.token_ids.length - nBlocks() * holders.block_tokens;
    const tail = rest > 0 ? ` and ${plural(rest, "token", "tokens")}` : "";
    setText(shownOf, `${plural(nBlocks(), "block", "blocks")} of ${holders.block_tokens} tokens${tail}, as ${worker} has them`);
    const nHeld = mine.filter(Boolean).length;
    canvas.setAttribute("aria-label", `${nBlocks()} blocks of the prompt; ${worker} holds ${nHeld} of them. Arrow keys walk through them.`);
    map.show(mine, others);
    setText(detail, holders.is_complete ? "Point at a block, or walk with the arrow keys." : "The index had too many pieces to ask for all of them; workers may hold more.");
  }

  async function describe(block) {
    if (block === null || !found) return;
    map.select(block);
    const { holders } = found;
    const first = block * holders.block_tokens;
    const tokens = holders.token_ids.slice(first, first + holders.block_tokens);
    const at = Object.entries(holders.workers).flatMap(([worker, runs]) => {
      const run = runs.find((each) => each.first_token <= first && first < each.first_token + each.tokens);
      return run ? [`${worker} (${tierName(run.tier)})`] : [];
    });
    const where = at.length > 0 ? at.slice(0, 8).join(", ") + (at.length > 8 ? ` and ${at.length - 8} more` : "") : "nowhere, it would be computed";
    const write = (text) => setText(detail, `Block ${block}, tokens ${first} to ${first + tokens.length - 1}${text ? ` “${text}”` : ""}: ${where}`);
    write(texts.get(block));
    if (texts.has(block)) return;
    try {
      const { prompt: text } = await post("detokenize", { model: holders.model, tokens });
      texts.set(block, text.replaceAll("\n", "⏎"));
      if (map.selected === block) write(texts.get(block));
    } catch {
      // The block's place says enough.
    }
  }

  async function act(action) {
    const worker = chosen;
    const words = {
      pin: ["Pin", `Its chunks stay in the memory of ${worker} until they are unpinned.`, "pinned"],
      unpin: ["Unpin", `Its chunks may be evicted from ${worker} again.`, "unpinned"],
      clear: ["Clear", `Its chunks are forgotten in every tier of ${worker}. Those that other, stored prompts go on from stay.`, "forgotten"],
    }[action];
    await ask({
      title: `${words[0]} this prompt at ${worker}?`,
      content: h("p", {}, words[1]),
      confirm: words[0],
      danger: action === "clear",
      submit: async () => {
        const answer = await post(path(worker, `cache/${action}`), { token_ids: found.holders.token_ids, ...(salt.value ? { cache_salt: salt.value } : {}) });
        const amount = action === "clear" ? plural(sum(answer.chunks), "chunk", "chunks") : plural(answer.tokens, "token", "tokens");
        toast(`${worker}: ${amount} ${words[2]}`);
      },
    });
    soon();
  }

  canvas.addEventListener("pointermove", (event) => describe(map.at(event)));
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -map.nColumns, ArrowDown: map.nColumns }[event.key];
    if (!step || !found) return;
    event.preventDefault();
    describe(Math.min(nBlocks() - 1, Math.max(0, (map.selected ?? -step) + step)));
  });
  const redraw = () => {
    if (!found || result.hidden || !element.isConnected) return;
    map.draw();
  };
  new ResizeObserver(redraw).observe(canvas.parentElement);
  addEventListener("kvik-theme", () => found && !result.hidden && show());

  return {
    element,
    enter: () => found && !result.hidden && show(),
    update({ fleet }) {
      const models = [...new Set((fleet ?? state.fleet)?.workers.flatMap((worker) => worker.models) ?? [])].sort();
      if (model.dataset.models === models.join("|")) return;
      model.dataset.models = models.join("|");
      const before = model.value;
      model.replaceChildren(...models.map((name) => h("option", { value: name }, name)));
      if (models.includes(before)) model.value = before;
    },
  };
}
