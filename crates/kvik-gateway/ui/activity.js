// What happens between two looks at the fleet, in sentences.

import { bytes, byTier, count, plural, tierName } from "./format.js";

// Where more happens in a second than can be read, workers that do the same are told of together.
const MAX_SINGLE = 12;

function grown(now, before, name) {
  return Math.max(0, (now[name] ?? 0) - (before[name] ?? 0));
}

function grownByTier(now, before, name) {
  return byTier(now[name])
    .map(([tier, value]) => [tier, value - (before[name]?.[tier] ?? 0)])
    .filter(([, value]) => value > 0);
}

// What a count that has grown means; `amount` is by how much.
const BY_TIER = {
  cached_tokens: (tier, amount) => (tier === "engine" ? `found ${count(amount)} prompt tokens in the engine` : `loaded ${count(amount)} prompt tokens from ${tier}`),
  read_bytes: (tier, amount) => (tier === "peer" ? `fetched ${bytes(amount)} from other nodes` : `read ${bytes(amount)} from ${tier}`),
  written_bytes: (tier, amount) => `stored ${bytes(amount)} in ${tier}`,
  evicted_chunks: (tier, amount) => `evicted ${plural(amount, "chunk", "chunks")} from ${tier}`,
};
const PLAIN = {
  evicted_blocks: ["engine", (amount) => `evicted ${plural(amount, "block", "blocks")} from the engine`],
  moved_out: ["move", (amount) => `sent ${plural(amount, "running request", "running requests")} to another worker`],
  moved_in: ["move", (amount) => `took over ${plural(amount, "running request", "running requests")}`],
  preemptions: ["bad", (amount) => `put back ${plural(amount, "sequence", "sequences")} for lack of KV blocks`],
};
const STATES = { ready: "takes requests", draining: "drains", down: "is down", silent: "does not answer" };

function* changesOf(worker, before) {
  if (worker.state !== before.state) yield { kind: worker.state === "ready" ? "good" : "bad", text: STATES[worker.state] ?? worker.state };
  if (!worker.totals || !before.totals) return;
  for (const [name, say] of Object.entries(BY_TIER)) {
    for (const [tier, amount] of grownByTier(worker.totals, before.totals, name)) {
      yield { tier, what: `${name} ${tier}`, amount, say: (all) => say(tierName(tier), all) };
    }
  }
  for (const [name, [kind, say]] of Object.entries(PLAIN)) {
    const amount = grown(worker.totals, before.totals, name);
    if (amount > 0) yield { kind, what: name, amount, say };
  }
}

/** Tells of workers that do the same together. */
function together(found) {
  const groups = new Map();
  const single = [];
  for (const change of found) {
    if (!change.what) {
      single.push(change);
    } else if (groups.has(change.what)) {
      const group = groups.get(change.what);
      group.amount += change.amount;
      group.nWorkers += 1;
    } else {
      groups.set(change.what, { ...change, nWorkers: 1 });
    }
  }
  const grouped = [...groups.values()].map((group) => (group.nWorkers > 1 ? { ...group, worker: `${count(group.nWorkers)} workers` } : group));
  return [...grouped, ...single];
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
  const told = found.length > MAX_SINGLE ? together(found) : found;
  return told.map(({ worker, kind, tier, text, amount, say }) => ({ worker, kind, tier, text: text ?? say(amount) }));
}
