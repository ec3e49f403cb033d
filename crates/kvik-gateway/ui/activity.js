// What happens between two looks at the fleet, in sentences.

import { bytes, byTier, count, plural, tierName } from "./format.js";

function grown(now, before, name) {
  return Math.max(0, (now[name] ?? 0) - (before[name] ?? 0));
}

function grownByTier(now, before, name) {
  return byTier(now[name])
    .map(([tier, value]) => [tier, value - (before[name]?.[tier] ?? 0)])
    .filter(([, value]) => value > 0);
}

function* changesOf(worker, before) {
  if (worker.state !== before.state) {
    const words = { ready: "takes requests", draining: "drains", down: "is down", silent: "does not answer" };
    yield { kind: worker.state === "ready" ? "good" : "bad", text: words[worker.state] ?? worker.state };
  }
  if (!worker.totals || !before.totals) return;
  const now = worker.totals;
  const then = before.totals;
  for (const [tier, tokens] of grownByTier(now, then, "cached_tokens")) {
    const name = tierName(tier);
    const text = name === "engine" ? `found ${count(tokens)} prompt tokens in its engine` : `loaded ${count(tokens)} prompt tokens from ${name}`;
    yield { tier, text };
  }
  for (const [tier, amount] of grownByTier(now, then, "read_bytes")) {
    const text = tierName(tier) === "peer" ? `fetched ${bytes(amount)} from other nodes` : `read ${bytes(amount)} from ${tierName(tier)}`;
    yield { tier, text };
  }
  for (const [tier, amount] of grownByTier(now, then, "written_bytes")) yield { tier, text: `stored ${bytes(amount)} in ${tierName(tier)}` };
  for (const [tier, chunks] of grownByTier(now, then, "evicted_chunks")) {
    yield { tier, text: `evicted ${plural(chunks, "chunk", "chunks")} from ${tierName(tier)}` };
  }
  const out = grown(now, then, "moved_out");
  if (out > 0) yield { kind: "move", text: `sent ${plural(out, "running request", "running requests")} to another worker` };
  const into = grown(now, then, "moved_in");
  if (into > 0) yield { kind: "move", text: `took over ${plural(into, "running request", "running requests")}` };
  const preempted = grown(now, then, "preemptions");
  if (preempted > 0) yield { kind: "bad", text: `put back ${plural(preempted, "sequence", "sequences")} for lack of KV blocks` };
}

/** The changes from one fleet to the next: `{ worker, text, tier?, kind? }`. */
export function changes(before, now) {
  if (!before) return [];
  const earlier = new Map(before.workers.map((worker) => [worker.id, worker]));
  const found = [];
  for (const worker of now.workers) {
    const then = earlier.get(worker.id);
    earlier.delete(worker.id);
    if (!then) found.push({ worker: worker.id, kind: "good", text: "joined" });
    else for (const change of changesOf(worker, then)) found.push({ worker: worker.id, ...change });
  }
  for (const id of earlier.keys()) found.push({ worker: id, kind: "bad", text: "left" });
  return found;
}
