// Calls to the gateway. Paths are relative: a proxy may serve the gateway below a path of its own.

const KEY = "kvik.key";
const TOKEN = "kvik.token";

// Credentials go into headers only, and are kept by the browser for this tab alone.
export const credentials = {
  get key() {
    return sessionStorage.getItem(KEY) ?? "";
  },
  get token() {
    return sessionStorage.getItem(TOKEN) ?? "";
  },
  set(key, token) {
    for (const [name, value] of [[KEY, key], [TOKEN, token]]) {
      if (value) sessionStorage.setItem(name, value);
      else sessionStorage.removeItem(name);
    }
    dispatchEvent(new Event("kvik-credentials"));
  },
};

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers() {
  const all = {};
  if (credentials.key) all.authorization = `Bearer ${credentials.key}`;
  if (credentials.token) all["x-kvik-cluster-token"] = credentials.token;
  return all;
}

async function refused(response) {
  let message = `the gateway answered ${response.status}`;
  try {
    message = (await response.json()).error.message ?? message;
  } catch {
    // Not JSON; the status says enough.
  }
  return new ApiError(response.status, message);
}

/** Sends a request and gives the response; throws an ApiError where it is no success. */
export async function open(path, { method = "GET", body, signal } = {}) {
  const all = headers();
  if (body !== undefined) all["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(`../${path}`, {
      method,
      headers: all,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "omit",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "the gateway cannot be reached");
  }
  if (!response.ok) throw await refused(response);
  return response;
}

export async function get(path, signal) {
  return (await open(path, { signal })).json();
}

export async function post(path, body, signal) {
  const response = await open(path, { method: "POST", body, signal });
  return response.status === 204 ? null : response.json();
}

export function worker(id, path) {
  return `ui/workers/${encodeURIComponent(id)}/${path}`;
}

/** The data of each server-sent event of a response. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      text += value;
      let end;
      while ((end = text.indexOf("\n\n")) >= 0) {
        const event = text.slice(0, end);
        text = text.slice(end + 2);
        const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        if (data.length > 0) yield data.join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
