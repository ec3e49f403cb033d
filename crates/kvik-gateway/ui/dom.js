// Elements without markup in strings: what comes from the network is always text.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (name === "style") {
      for (const [property, amount] of Object.entries(value)) element.style.setProperty(property, amount);
    } else if (name === "value" || name === "checked" || name === "disabled" || name === "hidden") {
      element[name] = value;
    } else {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** An HTML element with attributes, listeners (`on`), style properties (`style`) and children. */
export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** The same for SVG. */
export function s(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

/** Sets a text if it differs, so that nothing is laid out again for nothing. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setClass(element, name, isSet) {
  if (element.classList.contains(name) !== isSet) element.classList.toggle(name, isSet);
}

/** A bar that is filled to a share, 0 to 1; `set` changes it. */
export function bar(label, kind) {
  const inner = h("span", { class: `fill ${kind ?? ""}` });
  const element = h("span", { class: "bar", role: "meter", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100 }, inner);
  let last = -1;
  return {
    element,
    set(share) {
      const percent = Math.round(1000 * Math.min(1, Math.max(0, share || 0))) / 10;
      if (percent === last) return;
      last = percent;
      inner.style.setProperty("transform", `scaleX(${percent / 100})`);
      element.setAttribute("aria-valuenow", percent);
    },
  };
}

/** A note that goes away by itself. */
export function toast(text, kind) {
  const element = h("p", { class: `toast ${kind ?? ""}` }, text);
  document.getElementById("toasts").append(element);
  setTimeout(() => element.remove(), kind === "bad" ? 9000 : 5000);
}
