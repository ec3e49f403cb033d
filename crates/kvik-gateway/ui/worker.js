// One worker: what runs on it, and what an operator can do with it.

import { get, post, worker as path } from "./api.js";
import { ask, field } from "./dialog.js";
import { h, setText, toast } from "./dom.js";
import { bytes, byTier, count, percent, plural, sum, tierKind, tierName } from "./format.js";
import { state, subscribe } from "./live.js";

const REFRESH_MS = 1000;
const MAX_SEQUENCES = 200;

function row(label) {
  const value = h("dd", {}, "–");
  return { element: h("div", {}, h("dt", {}, label), value), value };
}

/** Asks whether a worker shall drain, and has it drain. */
export function drain(id) {
  const deadline = h("input", { type: "number", min: 1, max: 86400, value: 60, required: true });
  return ask({
    title: `Drain ${id}?`,
    content: h(
      "div",
      {},
      h("p", {}, "It takes nothing new. Its running requests go to other workers with their KV, or end here; then its process ends."),
      field("Deadline in seconds", deadline, "What still runs after that is ended."),
    ),
    confirm: "Drain",
    danger: true,
    submit: async () => {
      await post(path(id, "drain"), { deadline_s: Number(deadline.value) });
      toast(`${id} drains`);
    },
  });
}

function clear(id) {
  return ask({
    title: `Clear the store of ${id}?`,
    content: h("p", {}, "Every chunk of its model is forgotten in all of its tiers, remote ones included. What is needed again is computed again."),
    confirm: "Clear everything",
    danger: true,
    submit: async () => {
      const { chunks } = await post(path(id, "cache/clear"), {});
      toast(`${id}: ${plural(sum(chunks), "chunk", "chunks")} forgotten`);
    },
  });
}

function move(id, sequence) {
  const others = (state.fleet?.workers ?? []).filter((other) => other.kind === "worker" && other.id !== id && other.state === "ready");
  const to = h("select", { required: true }, others.map((other) => h("option", { value: other.id }, other.id)));
  return ask({
    title: `Move ${sequence.seq_id ?? sequence.id}?`,
    content:
      others.length === 0
        ? h("p", {}, "There is no other worker that takes requests.")
        : h(
            "div",
            {},
            h("p", {}, `${count(sequence.prompt_tokens)} prompt tokens and ${count(sequence.output_tokens)} generated ones go on at another worker. The client notices nothing.`),
            field("To", to),
          ),
    confirm: "Move",
    submit: async () => {
      if (!to.value) throw new Error("There is no worker to move it to.");
      const moved = await post(path(id, `sequences/${encodeURIComponent(sequence.id)}/move`), { to: to.value });
      toast(`moved to ${to.value}${moved?.copied_bytes ? `, ${bytes(moved.copied_bytes)} of KV` : ""}`);
    },
  });
}

/** The row of a running sequence; it stays while the sequence runs, so that a focus on its button does. */
function sequenceRow(id, sequence) {
  const shown = { ...sequence };
  const prompt = h("td", { class: "number" });
  const output = h("td", { class: "number" });
  const button = h("button", { type: "button", on: { click: () => move(id, shown) } });
  return {
    element: h("tr", {}, h("td", {}, h("code", {}, sequence.seq_id ?? sequence.id.slice(0, 12))), prompt, output, h("td", {}, button)),
    set(now) {
      Object.assign(shown, now);
      setText(prompt, count(now.prompt_tokens));
      setText(output, count(now.output_tokens));
      setText(button, now.is_moving ? "moves" : "Move");
      button.disabled = !now.can_move || now.is_moving;
    },
  };
}

function sequenceTable(id) {
  const rows = new Map();
  const body = h("tbody");
  const note = h("p", { class: "empty" }, "Asking the worker.");
  const heads = ["Sequence", "Prompt", "Output", "Move"].map((name, place) => h("th", { scope: "col", class: place === 1 || place === 2 ? "number" : null }, name));
  const table = h("table", { hidden: true }, h("thead", {}, h("tr", {}, heads)), body);

  function show(sequences) {
    const present = new Set(sequences.map((sequence) => sequence.id));
    for (const [name, row] of rows) {
      if (present.has(name)) continue;
      row.element.remove();
      rows.delete(name);
    }
    for (const sequence of sequences) {
      if (!rows.has(sequence.id)) {
        rows.set(sequence.id, sequenceRow(id, sequence));
        body.append(rows.get(sequence.id).element);
      }
      rows.get(sequence.id).set(sequence);
    }
    table.hidden = rows.size === 0;
    note.hidden = rows.size > 0;
    setText(note, "Nothing runs here.");
  }

  return {
    element: h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Running sequences" }, note, table),
    async refresh(signal) {
      try {
        const { sequences } = await get(path(id, "sequences"), signal);
        show(sequences.slice(0, MAX_SEQUENCES));
      } catch (error) {
        if (error.name === "AbortError") return;
        table.hidden = true;
        note.hidden = false;
        setText(note, error.message);
      }
    },
  };
}

/** Opens the panel of a worker. */
export function openWorker(id) {
  const rows = Object.fromEntries(
    ["State", "Address", "Model", "Share of the ring", "Sent by this gateway", "Prefill speed", "KV blocks", "Known to the index", "Since its start"].map((label) => [label, row(label)]),
  );
  const tiers = h("div", { class: "tiers" });
  const sequences = sequenceTable(id);
  const controller = new AbortController();
  const close = h("button", { type: "button", class: "quiet", on: { click: () => dialog.close() } }, "Close");
  const actions = h(
    "div",
    { class: "buttons" },
    h("button", { type: "button", class: "danger", on: { click: () => drain(id) } }, "Drain"),
    h("button", { type: "button", class: "danger", on: { click: () => clear(id) } }, "Clear its store"),
    close,
  );
  const running = h("section", {}, h("h3", {}, "Running sequences"), sequences.element);
  const dialog = h(
    "dialog",
    { class: "panel", "aria-labelledby": "panel-title" },
    h("h2", { id: "panel-title" }, id),
    h("dl", { class: "facts" }, Object.values(rows).map((each) => each.element)),
    tiers,
    running,
    actions,
  );

  function update() {
    const worker = state.fleet?.workers.find((each) => each.id === id);
    if (!worker) {
      setText(rows.State.value, "gone");
      return;
    }
    const { gauges, totals } = worker;
    setText(rows.State.value, worker.role === "both" ? worker.state : `${worker.state}, ${worker.role}`);
    setText(rows.Address.value, worker.address);
    setText(rows.Model.value, worker.models.join(", "));
    setText(rows["Share of the ring"].value, `weight ${count(worker.weight)}`);
    setText(rows["Sent by this gateway"].value, `${count(worker.outstanding_tokens)} tokens outstanding`);
    setText(rows["Prefill speed"].value, worker.prefill_tokens_per_s ? `${count(worker.prefill_tokens_per_s)} tokens/s` : "not measured lately");
    const most = gauges?.kv_blocks_limit > gauges?.kv_blocks ? ` (at most ${count(gauges.kv_blocks_limit)})` : "";
    setText(rows["KV blocks"].value, gauges ? `${count(gauges.kv_blocks_cached)} of ${count(gauges.kv_blocks)}${most} filled, ${percent(gauges.kv_usage)} held by running sequences` : "–");
    setText(rows["Known to the index"].value, worker.index_blocks === null ? "nothing" : `${count(worker.index_blocks)} blocks${worker.is_unsure ? ", events are missing" : ""}`);
    setText(rows["Since its start"].value, totals ? `${count(totals.prompt_tokens)} prompt tokens, ${count(sum(totals.cached_tokens))} of them cached; ${count(totals.generated_tokens)} generated` : "–");
    tiers.replaceChildren(
      ...byTier(gauges?.tiers).map(([tier, each]) =>
        h("p", {}, h("span", { class: `mark ${tierKind(tier)}`, "aria-hidden": "true" }), `${tierName(tier)}: ${plural(each.chunks, "chunk", "chunks")}, ${bytes(each.used_bytes)} of ${bytes(each.capacity_bytes)}${each.is_up ? "" : ", down"}`),
      ),
    );
    running.hidden = worker.kind !== "worker";
    for (const button of actions.querySelectorAll(".danger")) button.hidden = worker.kind !== "worker";
  }

  const unsubscribe = subscribe(update);
  const timer = setInterval(() => sequences.refresh(controller.signal), REFRESH_MS);
  dialog.addEventListener("close", () => {
    unsubscribe();
    clearInterval(timer);
    controller.abort();
    dialog.remove();
  });
  update();
  sequences.refresh(controller.signal);
  document.body.append(dialog);
  dialog.showModal();
  close.focus();
}
