// A conversation with a model, and the same once more without any cache beside it.

import { events, open } from "./api.js";
import { h, setText } from "./dom.js";
import { byTier, count, percent, seconds, sum, tierKind, tierName } from "./format.js";

/** Sends a request as a stream; calls `grow` with each piece of text, and gives what was measured. */
async function measure(request, isChat, signal, grow) {
  const began = performance.now();
  const response = await open(isChat ? "v1/chat/completions" : "v1/completions", { method: "POST", body: { ...request, stream: true, stream_options: { include_usage: true } }, signal });
  const found = { worker: response.headers.get("x-kvik-worker"), first: null, usage: null, text: "", pieces: 0, reason: null };
  let last = began;
  for await (const data of events(response)) {
    if (data === "[DONE]") break;
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    if (event.usage) found.usage = event.usage;
    const choice = event.choices?.[0];
    const text = isChat ? choice?.delta?.content : choice?.text;
    found.reason = choice?.finish_reason ?? found.reason;
    if (text) {
      last = performance.now();
      found.first ??= (last - began) / 1000;
      found.pieces += 1;
      found.text += text;
      grow(text);
    }
  }
  found.total = (performance.now() - began) / 1000;
  const tokens = found.usage?.completion_tokens ?? found.pieces;
  const generating = (last - began) / 1000 - (found.first ?? 0);
  found.speed = tokens > 1 && generating > 0 ? (tokens - 1) / generating : null;
  return found;
}

function sources(usage) {
  if (!usage) return [];
  const details = usage.prompt_tokens_details ?? {};
  const tiers = details.cached_tokens_by_tier ?? (details.cached_tokens ? { engine: details.cached_tokens } : {});
  const cached = byTier(tiers).filter(([, tokens]) => tokens > 0);
  const rest = usage.prompt_tokens - sum(tiers);
  return [...cached.map(([tier, tokens]) => [tierKind(tier), `from ${tierName(tier)}`, tokens]), ["none", "computed", rest]];
}

function figures() {
  const values = Object.fromEntries(["First token", "Speed", "Whole answer", "Worker"].map((name) => [name, h("dd", {}, "–")]));
  const strip = h("div", { class: "strip", role: "img", "aria-label": "Where the prompt's KV came from" });
  const words = h("ul", { class: "legend" });
  return {
    element: h("div", { class: "figures" }, h("dl", {}, Object.entries(values).map(([name, value]) => h("div", {}, h("dt", {}, name), value))), strip, words),
    clear() {
      for (const value of Object.values(values)) setText(value, "–");
      strip.replaceChildren();
      words.replaceChildren();
    },
    show(found) {
      setText(values["First token"], seconds(found.first));
      setText(values.Speed, found.speed ? `${count(found.speed)} tok/s` : "–");
      setText(values["Whole answer"], seconds(found.total));
      setText(values.Worker, found.worker ?? "not told");
      const parts = sources(found.usage);
      const all = Math.max(1, found.usage?.prompt_tokens ?? 0);
      strip.replaceChildren(...parts.map(([kind, , tokens]) => h("span", { class: kind, style: { "flex-grow": tokens / all } })));
      strip.setAttribute("aria-label", parts.map(([, name, tokens]) => `${tokens} tokens ${name}`).join(", "));
      words.replaceChildren(...parts.map(([kind, name, tokens]) => h("li", {}, h("span", { class: `mark ${kind}`, "aria-hidden": "true" }), `${count(tokens)} ${name} (${percent(tokens / all)})`)));
    },
  };
}

function pane(title, note) {
  const shown = figures();
  const text = h("div", { class: "answer", tabindex: 0, role: "log", "aria-label": `${title}: the answer` });
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  return {
    element: h("section", { class: "sheet pane" }, h("h2", {}, title), h("p", { class: "hint" }, note), shown.element, text, problem),
    text,
    problem,
    shown,
  };
}

export function playgroundView() {
  const model = h("select", {});
  const mode = h("select", {}, h("option", { value: "chat" }, "Chat"), h("option", { value: "text" }, "Continue a text"));
  const limit = h("input", { type: "number", min: 1, max: 4096, value: 96 });
  const temperature = h("input", { type: "number", min: 0, max: 2, step: 0.1, value: 0 });
  const compare = h("input", { type: "checkbox", checked: true });
  const input = h("textarea", { rows: 4, "aria-label": "Message", placeholder: "Ask something. Send it again, or go on, to see what the cache saves." });
  const send = h("button", { type: "submit", class: "primary" }, "Send");
  const stop = h("button", { type: "button", class: "quiet", hidden: true }, "Stop");
  const anew = h("button", { type: "button", class: "quiet" }, "New conversation");
  const sample = h("button", { type: "button", class: "quiet" }, "A long sample");
  const warm = pane("With the cache", "As every client is served");
  const cold = pane("Cold", "The same with a cache salt that was never used: nothing of it is anywhere");
  const gain = h("p", { class: "verdict", role: "status" });
  const form = h(
    "form",
    { class: "sheet" },
    h(
      "div",
      { class: "controls" },
      h("label", { class: "inline" }, "Model ", model),
      h("label", { class: "inline" }, "As ", mode),
      h("label", { class: "inline" }, "Tokens ", limit),
      h("label", { class: "inline" }, "Temperature ", temperature),
      h("label", { class: "inline" }, compare, " with a cold run"),
    ),
    input,
    h("div", { class: "buttons start" }, send, stop, anew, sample),
  );
  const element = h("div", { class: "playground" }, form, gain, h("div", { class: "panes" }, warm.element, cold.element));
  let messages = [];
  let controller = null;

  function say(target, kind, text) {
    const line = h("p", { class: `turn ${kind}` }, text);
    target.text.append(line);
    target.text.scrollTop = target.text.scrollHeight;
    return line;
  }

  async function ask(target, request, isChat) {
    target.problem.hidden = true;
    target.shown.clear();
    const line = say(target, "reply", "");
    line.classList.add("busy");
    try {
      const found = await measure(request, isChat, controller.signal, (text) => {
        line.append(text);
        target.text.scrollTop = target.text.scrollHeight;
      });
      target.shown.show(found);
      return found;
    } catch (error) {
      if (error.name !== "AbortError") {
        target.problem.textContent = error.message;
        target.problem.hidden = false;
      }
      return null;
    } finally {
      line.classList.remove("busy");
    }
  }

  function salt() {
    const digits = crypto.getRandomValues(new Uint32Array(4));
    return `cold-${[...digits].map((digit) => digit.toString(16)).join("")}`;
  }

  async function run() {
    const isChat = mode.value === "chat";
    const text = input.value;
    if (!text.trim() || controller) return;
    controller = new AbortController();
    send.disabled = true;
    stop.hidden = false;
    setText(gain, "");
    if (!isChat) warm.text.replaceChildren();
    cold.text.replaceChildren();
    cold.shown.clear();
    const asked = [...messages, { role: "user", content: text }];
    const request = { model: model.value, max_tokens: Number(limit.value), temperature: Number(temperature.value), ...(isChat ? { messages: asked } : { prompt: text }) };
    say(warm, "user", text);
    if (compare.checked) say(cold, "user", text);
    const first = await ask(warm, request, isChat);
    if (first && isChat) {
      messages = [...asked, { role: "assistant", content: first.text }];
      input.value = "";
    }
    if (first && compare.checked && !controller.signal.aborted) {
      const second = await ask(cold, { ...request, cache_salt: salt() }, isChat);
      if (second?.first && first.first) {
        const ratio = second.first / first.first;
        const cached = sum(first.usage?.prompt_tokens_details?.cached_tokens_by_tier);
        setText(gain, cached === 0 ? "Nothing of this prompt was cached yet; send it again." : `The first token came ${ratio >= 1 ? `${ratio.toFixed(1)} times sooner` : "later"} with the cache: ${seconds(first.first)} instead of ${seconds(second.first)}.`);
      }
    }
    controller = null;
    send.disabled = false;
    stop.hidden = true;
    input.focus();
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run();
  });
  stop.addEventListener("click", () => controller?.abort());
  anew.addEventListener("click", () => {
    controller?.abort();
    messages = [];
    for (const each of [warm, cold]) {
      each.text.replaceChildren();
      each.shown.clear();
    }
    setText(gain, "");
    input.focus();
  });
  sample.addEventListener("click", () => {
    mode.value = "text";
    const days = ["The sun came up over the hills, and the fox went down to the river.", "A bird sang in the old tree, and the wind took the song over the fields.", "The fox found a red ball in the grass and carried it home."];
    input.value = Array.from({ length: 45 }, (_, day) => `Day ${day + 1}. ${days[day % days.length]}`).join(" ");
    limit.value = 48;
    input.focus();
  });

  return {
    element,
    update({ fleet }) {
      const models = [...new Set(fleet?.workers.flatMap((worker) => worker.models) ?? [])].sort();
      if (model.dataset.models === models.join("|")) return;
      model.dataset.models = models.join("|");
      const before = model.value;
      model.replaceChildren(...models.map((name) => h("option", { value: name }, name)));
      if (models.includes(before)) model.value = before;
    },
  };
}
