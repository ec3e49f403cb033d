// Charts over time as SVG: lines, or areas on each other; a cross hair that the keyboard moves too.

import { h, s, setText } from "./dom.js";
import { clock } from "./format.js";

const HEIGHT = 190;
const LEFT = 62;
const RIGHT = 12;
const TOP = 12;
const BOTTOM = 24;

/** A round number at or above `value`, for the top of an axis. */
function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 7.5, 10].map((step) => step * power).find((step) => step >= value) ?? value;
}

/** Runs of points that have a value. */
function runs(values) {
  const found = [];
  let open = null;
  values.forEach((value, place) => {
    if (value === null || value === undefined) {
      open = null;
      return;
    }
    if (!open) found.push((open = []));
    open.push(place);
  });
  return found;
}

/**
 * A chart. `series(points)` gives `[{ name, kind, values }]`, `kind` being the name of a color; `format` writes a value; `isStacked` puts areas on
 * each other; `max` fixes the top of the axis.
 */
export function chart({ title, note, series, format, isStacked, max }) {
  const svg = s("svg", { class: "plot", role: "img", tabindex: 0, "aria-label": title });
  const legend = h("ul", { class: "legend" });
  const readout = h("p", { class: "readout", "aria-live": "off" });
  const element = h("figure", { class: "chart" }, h("figcaption", {}, h("h2", {}, title), h("p", {}, note)), legend, svg, readout);
  let points = [];
  let shown = [];
  let cursor = null;
  let width = 0;
  let hair = null;

  const x = (place) => LEFT + ((width - LEFT - RIGHT) * place) / Math.max(1, points.length - 1);

  function paths(y) {
    const base = points.map(() => 0);
    return shown.flatMap(({ kind, values }) => {
      const tops = isStacked ? values.map((value, place) => (value === null ? null : base[place] + value)) : values;
      const lines = runs(tops).flatMap((run) => {
        const line = run.map((place, at) => `${at === 0 ? "M" : "L"}${x(place).toFixed(1)} ${y(tops[place]).toFixed(1)}`).join("");
        const stroke = s("path", { class: `line ${kind}`, d: run.length > 1 ? line : `${line}h0.1` });
        if (!isStacked) return [stroke];
        const back = [...run].reverse().map((place) => `L${x(place).toFixed(1)} ${y(base[place]).toFixed(1)}`).join("");
        return [s("path", { class: `area ${kind}`, d: `${line}${back}Z` }), stroke];
      });
      if (isStacked) values.forEach((value, place) => (base[place] += value ?? 0));
      return lines;
    });
  }

  function draw() {
    width = Math.max(240, svg.clientWidth || 480);
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const totals = points.map((_, place) => shown.reduce((total, { values }) => (isStacked ? total + (values[place] ?? 0) : Math.max(total, values[place] ?? 0)), 0));
    const top = max ?? ceiling(Math.max(0, ...totals));
    const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - Math.min(1, value / top));
    const grid = [0, 0.5, 1].map((share) =>
      s("g", {}, s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(top * share), y2: y(top * share) }), s("text", { class: "tick", x: LEFT - 8, y: y(top * share) + 4, "text-anchor": "end" }, format(top * share))),
    );
    const labels = points.length < 2 ? [] : [0, 0.5, 1].map((share) => {
      const place = Math.round((points.length - 1) * share);
      const anchor = share === 0 ? "start" : share === 1 ? "end" : "middle";
      return s("text", { class: "tick", x: x(place), y: HEIGHT - 6, "text-anchor": anchor }, clock(points[place].time_s * 1000, points.length < 60));
    });
    hair = s("line", { class: "hair", x1: 0, x2: 0, y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    svg.replaceChildren(...grid, ...labels, ...paths(y), hair);
    if (points.length < 2) svg.append(s("text", { class: "tick", x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "The first points come within twenty seconds."));
    read();
  }

  function read() {
    const place = cursor === null ? points.length - 1 : Math.min(cursor, points.length - 1);
    if (place < 0) {
      setText(readout, "");
      return;
    }
    hair?.setAttribute("visibility", cursor === null ? "hidden" : "visible");
    hair?.setAttribute("x1", x(place));
    hair?.setAttribute("x2", x(place));
    const parts = shown.map(({ name, values }) => `${name} ${values[place] === null || values[place] === undefined ? "–" : format(values[place])}`);
    setText(readout, `${clock(points[place].time_s * 1000)}  ${parts.join(" · ")}`);
  }

  function point(event) {
    const box = svg.getBoundingClientRect();
    const share = ((event.clientX - box.left) * (width / box.width) - LEFT) / (width - LEFT - RIGHT);
    cursor = Math.round(Math.min(1, Math.max(0, share)) * (points.length - 1));
    read();
  }

  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerleave", () => {
    cursor = null;
    read();
  });
  svg.addEventListener("blur", () => {
    cursor = null;
    read();
  });
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || points.length === 0) return;
    event.preventDefault();
    readout.setAttribute("aria-live", "polite");
    cursor = Math.min(points.length - 1, Math.max(0, (cursor ?? points.length - 1) + step));
    read();
  });
  new ResizeObserver(() => {
    if (svg.clientWidth && Math.abs(svg.clientWidth - width) > 1) draw();
  }).observe(svg);

  return {
    element,
    title,
    update(next) {
      points = next;
      shown = series(points);
      const names = shown.map(({ name }) => name).join("|");
      if (legend.dataset.names !== names) {
        legend.dataset.names = names;
        legend.replaceChildren(...shown.map(({ name, kind }) => h("li", {}, h("span", { class: `mark ${kind}`, "aria-hidden": "true" }), name)));
      }
      if (element.isConnected) draw();
    },
    /** The same as rows of a table: names and values of a point. */
    values: (place) => shown.map(({ name, values }) => [name, values[place] === null || values[place] === undefined ? "–" : format(values[place])]),
  };
}
