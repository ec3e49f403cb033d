// Numbers for people: short, with their unit, and of steady width.

const THIN = "\u202f";

export function count(value) {
  if (!Number.isFinite(value)) return "–";
  const whole = Math.round(value);
  if (Math.abs(value) < 10 && value !== whole) return value.toFixed(1);
  if (Math.abs(value) >= 1e7) return `${(value / 1e6).toFixed(1)}${THIN}M`;
  return String(whole).replace(/\B(?=(\d{3})+(?!\d))/g, THIN);
}

export function bytes(value) {
  if (!Number.isFinite(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (value >= 1023.95 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)}${THIN}${units[unit]}`;
}

export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return `0${THIN}s`;
  if (value < 0.001) return `${Math.round(value * 1e6)}${THIN}µs`;
  if (value < 0.01) return `${(value * 1e3).toFixed(1)}${THIN}ms`;
  if (value < 1) return `${Math.round(value * 1e3)}${THIN}ms`;
  return `${value < 10 ? value.toFixed(2) : value.toFixed(1)}${THIN}s`;
}

export function percent(share) {
  if (!Number.isFinite(share)) return "–";
  const value = 100 * share;
  return `${value > 0 && value < 10 ? value.toFixed(1) : Math.round(value)}${THIN}%`;
}

export function clock(timeMs, withSeconds = true) {
  const time = new Date(timeMs);
  const two = (number) => String(number).padStart(2, "0");
  const text = `${two(time.getHours())}:${two(time.getMinutes())}`;
  return withSeconds ? `${text}:${two(time.getSeconds())}` : text;
}

export function sum(byName) {
  return Object.values(byName ?? {}).reduce((total, value) => total + value, 0);
}

export function plural(number, one, many) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

// Workers and the index have two vocabularies for tiers; the page has one.
const TIERS = { gpu: "engine", cpu: "ram", disk: "nvme" };
const ORDER = ["engine", "ram", "nvme", "peer", "redis", "object", "remote", "lm", "plugin"];

export function tierName(tier) {
  return TIERS[tier] ?? tier;
}

/** The name of a tier's color. */
export function tierKind(tier) {
  const name = tierName(tier);
  if (name === "engine" || name === "ram" || name === "nvme" || name === "peer") return name;
  return "remote";
}

/** Entries of an object by tier, fastest first. */
export function byTier(object) {
  const place = (tier) => {
    const at = ORDER.indexOf(tierName(tier));
    return at < 0 ? ORDER.length : at;
  };
  return Object.entries(object ?? {}).sort(([one], [other]) => place(one) - place(other) || (one < other ? -1 : 1));
}

/** A color of the page's style, for canvases. */
export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
