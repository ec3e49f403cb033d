// The blocks of a prompt as a map on a canvas: drawn by runs, so that ten thousand take as long as ten.

import { color, tierKind } from "./format.js";

const GAP = 1;

/** The tier of each block, or null, from a worker's runs. */
export function tiersOfBlocks(runs, nBlocks, blockTokens) {
  const tiers = new Array(nBlocks).fill(null);
  for (const { first_token: first, tokens, tier } of runs ?? []) {
    const end = Math.floor((first + tokens) / blockTokens);
    for (let block = Math.floor(first / blockTokens); block < end; block += 1) tiers[block] = tier;
  }
  return tiers;
}

function prepare(canvas, width, height) {
  const scale = globalThis.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.setProperty("height", `${height}px`);
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** Draws a worker's runs into one line. */
export function drawLine(canvas, runs, nTokens) {
  const width = canvas.clientWidth || 200;
  const height = 12;
  const context = prepare(canvas, width, height);
  context.fillStyle = color("--empty");
  context.fillRect(0, 0, width, height);
  for (const { first_token: first, tokens, tier } of runs ?? []) {
    context.fillStyle = color(`--${tierKind(tier)}`);
    context.fillRect((width * first) / nTokens, 0, Math.max(1, (width * tokens) / nTokens), height);
  }
}

/** The map of all blocks: `draw` shows one worker's tiers, `at` finds the block at a place. */
export function blockMap(canvas) {
  let nColumns = 1;
  let cell = 16;
  let tiers = [];
  let others = [];
  let selected = null;

  function layout(width) {
    // As large as fits well: a short prompt in big blocks, a long one in small ones.
    cell = [22, 18, 14, 11, 9, 7, 5].find((size) => Math.ceil(tiers.length / Math.floor(width / size)) * size <= 300) ?? 4;
    nColumns = Math.max(1, Math.floor(width / cell));
  }

  function draw() {
    const width = canvas.clientWidth || 600;
    layout(width);
    const nRows = Math.ceil(tiers.length / nColumns);
    const context = prepare(canvas, width, Math.max(cell, nRows * cell));
    const size = cell - (cell > 5 ? 2 * GAP : GAP);
    const groups = new Map();
    tiers.forEach((tier, block) => {
      const kind = tier ? `--${tierKind(tier)}` : others[block] ? "--elsewhere" : "--empty";
      if (!groups.has(kind)) groups.set(kind, []);
      groups.get(kind).push(block);
    });
    const round = cell > 9 && tiers.length < 3000 ? 3 : 0;
    for (const [kind, blocks] of groups) {
      context.fillStyle = color(kind);
      context.beginPath();
      for (const block of blocks) {
        const left = (block % nColumns) * cell;
        const top = Math.floor(block / nColumns) * cell;
        if (round) context.roundRect(left, top, size, size, round);
        else context.rect(left, top, size, size);
      }
      context.fill();
    }
    if (selected !== null) {
      context.strokeStyle = color("--text");
      context.lineWidth = 2;
      context.strokeRect((selected % nColumns) * cell, Math.floor(selected / nColumns) * cell, size, size);
    }
  }

  return {
    show(nextTiers, nextOthers) {
      tiers = nextTiers;
      others = nextOthers;
      if (selected !== null && selected >= tiers.length) selected = null;
      draw();
    },
    draw,
    select(block) {
      selected = block;
      draw();
    },
    get selected() {
      return selected;
    },
    get nColumns() {
      return nColumns;
    },
    at(event) {
      const box = canvas.getBoundingClientRect();
      const column = Math.floor((event.clientX - box.left) / cell);
      const block = Math.floor((event.clientY - box.top) / cell) * nColumns + column;
      return column < nColumns && block >= 0 && block < tiers.length ? block : null;
    },
  };
}
