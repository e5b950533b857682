// The service's API: receives paths and bodies, hands on documents, events and refusals in words.

let key = null;
const listeners = new Set();

export const hasKey = () => key !== null;
export function setKey(value) {
  key = value || null;
  for (const each of listeners) each();
}
export const onKey = (call) => listeners.add(call);

/** A refusal as the service words it. */
export class Refused extends Error {
  constructor(status, problem) {
    super(problem.detail || problem.title || `the service answered ${status}`);
    this.status = status;
    this.problem = problem;
  }
}

export async function ask(path, options = {}) {
  const headers = { ...(options.headers ?? {}) };
  if (key) headers.Authorization = `Bearer ${key}`;
  let reply;
  try {
    reply = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, { detail: "the service can't be reached" });
  }
  if (!reply.ok) {
    let problem = {};
    try { problem = await reply.json(); } catch { /* not every proxy says why in JSON */ }
    throw new Refused(reply.status, problem);
  }
  return reply;
}

export const get = async (path, signal) => (await ask(path, { signal })).json();

export const post = async (path, body, signal) => (await ask(path, {
  method: "POST", signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
})).json();

/** Events of a stream, until it ends. Read by fetch, since EventSource can't send a key. */
export async function events(path, onEvent, signal) {
  const reply = await ask(path, { signal, headers: { Accept: "text/event-stream" } });
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data) onEvent(JSON.parse(data));
    }
  }
}
