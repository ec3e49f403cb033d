// Questions before something changes.

import { credentials } from "./api.js";
import { h } from "./dom.js";

/**
 * Shows a dialog with `content` and resolves with what `submit` gives, or with null if it is closed. An error of `submit` is shown and the
 * dialog stays.
 */
export function ask({ title, content, confirm, danger, submit }) {
  return new Promise((resolve) => {
    const problem = h("p", { class: "problem", role: "alert", hidden: true });
    const yes = h("button", { type: "submit", class: danger ? "danger" : "primary" }, confirm);
    const no = h("button", { type: "button", class: "quiet", on: { click: () => dialog.close() } }, "Cancel");
    const form = h("form", { method: "dialog" }, h("h2", { id: "dialog-title" }, title), content, problem, h("div", { class: "buttons" }, no, yes));
    const dialog = h("dialog", { "aria-labelledby": "dialog-title" }, form);
    let result = null;
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      yes.disabled = true;
      problem.hidden = true;
      try {
        result = (await submit()) ?? true;
        dialog.close();
      } catch (error) {
        problem.textContent = error.message;
        problem.hidden = false;
      }
      yes.disabled = false;
    });
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(result);
    });
    document.body.append(dialog);
    dialog.showModal();
    // What destroys is not one key press away.
    if (danger) no.focus();
  });
}

/** A labeled input. */
export function field(label, input, hint) {
  return h("label", { class: "field" }, h("span", {}, label), input, hint ? h("small", {}, hint) : null);
}

/** Asks for the API key and the token. */
export function askCredentials() {
  const secret = (value) => h("input", { type: "password", autocomplete: "off", spellcheck: "false", value });
  const key = secret(credentials.key);
  const token = secret(credentials.token);
  return ask({
    title: "Keys of this gateway",
    content: h(
      "div",
      {},
      field("API key", key, "For chats and figures, where the gateway has api_keys."),
      field("Cluster or admin token", token, "For prompts, memory and everything that changes something."),
      h("p", { class: "hint" }, "Both are sent in headers only, and this tab forgets them when it is closed."),
    ),
    confirm: "Use them",
    submit: () => credentials.set(key.value.trim(), token.value.trim()),
  });
}
