// Try it: receives sizes and a seed from a form, sends a real product, hands on what came back and why.

import * as api from "./api.js";
import { digits, fill, flops, h, note, seconds, select, table, words } from "./dom.js";

const DTYPES = [["fp32", "fp32"], ["fp64", "fp64"], ["fp16", "fp16"], ["bf16", "bf16"]];
const BYTES = { fp16: 2, bf16: 2, fp32: 4, fp64: 8 };

/** Whole numbers from -2 to 2, the same for the same seed: their products are exact in every dtype. */
function whole(size, seed) {
  let state = (seed * 2654435761 + 1) >>> 0;
  const values = new Int8Array(size);
  for (let at = 0; at < size; at += 1) {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    values[at] = (state >>> 16) % 5 - 2;
  }
  return values;
}

// Bits of -2 … 2 in the types that JavaScript has no array of.
const HALF = [0xc000, 0xbc00, 0x0000, 0x3c00, 0x4000];
const BRAIN = [0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000];

function encoded(values, dtype) {
  if (dtype === "fp32") return Float32Array.from(values);
  if (dtype === "fp64") return Float64Array.from(values);
  return Uint16Array.from(values, (value) => (dtype === "fp16" ? HALF : BRAIN)[value + 2]);
}

/** The first entries of D by plain loops here: a check of the service that shares nothing with it. */
function expected(a, b, n, k, rows, columns) {
  const found = [];
  for (let i = 0; i < rows; i += 1) {
    for (let j = 0; j < columns; j += 1) {
      let sum = 0;
      for (let l = 0; l < k; l += 1) sum += a[i * k + l] * b[l * n + j];
      found.push(sum);
    }
  }
  return found;
}

async function checksum(buffer) {
  if (!crypto.subtle) return "needs https or localhost";
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", buffer));
  return [...digest].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

function timings(header) {
  const found = {};
  for (const part of (header ?? "").split(",")) {
    const [name, ...rest] = part.trim().split(";");
    const took = rest.map((each) => each.trim()).find((each) => each.startsWith("dur="));
    if (took) found[name] = Number(took.slice(4)) / 1e3;
  }
  return found;
}

export function view(root) {
  const number = (name, label, value, most) => h("label", { class: "field" }, h("span", {}, label),
    h("input", { type: "number", name, min: 1, max: most, value, required: true, inputmode: "numeric" }));
  const variant = h("select", { name: "variant" }, h("option", { value: "auto" }, "the selector's choice"));
  const button = h("button", { type: "submit", class: "primary" }, "Multiply");
  const form = h("form", { class: "controls", id: "try-form" },
    number("m", "M", 512, 8192), number("n", "N", 512, 8192), number("k", "K", 512, 8192),
    select("dtype", DTYPES, "fp32", () => {}, { name: "dtype" }),
    select("activation", [["none", "none"], ["relu", "relu"], ["gelu", "gelu"], ["silu", "silu"]], "none", () => {}, { name: "activation" }),
    h("label", { class: "field" }, h("span", {}, "variant"), variant),
    number("seed", "seed", 1, 999999),
    button);
  const answer = h("div", { class: "grid two", id: "answer" });
  const said = h("p", { class: "sr", role: "status" });
  root.append(
    h("p", { class: "lead" }, "Sends a real product: matrices of whole numbers from -2 to 2, made here from the seed. Such products are exact, so the checksum is the same on every device, whatever the kernel."),
    h("div", { class: "panel" }, form), said, answer);

  async function send(event) {
    event.preventDefault();
    const given = Object.fromEntries(new FormData(form));
    const [m, n, k] = ["m", "n", "k"].map((name) => Number(given[name]));
    button.disabled = true;
    said.textContent = "computing";
    try {
      const a = whole(m * k, Number(given.seed));
      const b = whole(k * n, Number(given.seed) + 1);
      const body = new Blob([encoded(a, given.dtype), encoded(b, given.dtype)]);
      const query = new URLSearchParams({
        a_shape: `${m}x${k}`, b_shape: `${k}x${n}`, dtype: given.dtype, out_dtype: given.dtype === "fp64" ? "fp64" : "fp32",
        activation: given.activation, variant: given.variant,
      });
      const started = performance.now();
      const reply = await api.ask(`/gemm?${query}`, {
        method: "POST", body, headers: { "Content-Type": "application/octet-stream", Accept: "application/octet-stream" },
      });
      const data = await reply.arrayBuffer();
      const spent = (performance.now() - started) / 1e3;
      const d = given.dtype === "fp64" ? new Float64Array(data) : new Float32Array(data);
      const question = { m, n, k, dtype: given.dtype, out_dtype: query.get("out_dtype"), activation: given.activation, variant: given.variant };
      const [sum, choice] = await Promise.all([checksum(data), api.post("/variants/choose", question)]);
      show({ reply, d, spent, sum, choice, given, m, n, k, a, b, sent: body.size });
      said.textContent = "done";
    } catch (error) {
      fill(answer, h("div", { class: "panel wide bad", role: "alert" }, h("h3", {}, error.status ? `Refused: ${error.status} ${error.problem?.code ?? ""}` : "Not sent"), h("p", {}, error.message)));
      said.textContent = "";
    } finally {
      button.disabled = false;
    }
  }

  function show({ reply, d, spent, sum, choice, given, m, n, k, a, b, sent }) {
    const times = timings(reply.headers.get("server-timing"));
    const work = 2 * m * n * k;
    const rows = Math.min(4, m);
    const columns = Math.min(6, n);
    const corner = Array.from({ length: rows }, (_, i) => Array.from({ length: columns }, (_, j) => d[i * n + j]));
    const ours = expected(a, b, n, k, rows, columns);
    const exact = given.activation === "none" || given.activation === "relu";
    const right = corner.flat().every((x, at) => x === (given.activation === "relu" ? Math.max(0, ours[at]) : ours[at]));
    fill(answer,
      h("div", { class: "panel" }, h("h3", {}, "Answer"),
        h("dl", { class: "facts" },
          h("dt", {}, "variant"), h("dd", { id: "try-variant" }, reply.headers.get("x-gemm-variant")),
          h("dt", {}, "reason"), h("dd", { id: "try-reason" }, reply.headers.get("x-gemm-reason")),
          h("dt", {}, "why"), h("dd", {}, choice.why),
          h("dt", {}, "SHA-256 of D"), h("dd", { class: "sum", id: "try-sum" }, sum),
          h("dt", {}, "checked here"), h("dd", { class: exact ? (right ? "good" : "bad") : "" }, exact ? `${rows}×${columns} entries ${right ? "agree" : "DIFFER"} with plain loops in this page` : "not with this activation"),
          h("dt", {}, "request id"), h("dd", {}, reply.headers.get("x-request-id")))),
      h("div", { class: "panel" }, h("h3", {}, "Times"),
        h("dl", { class: "facts" },
          Object.entries(times).map(([name, value]) => [h("dt", {}, name), h("dd", {}, words(seconds(value)))]),
          h("dt", {}, "seen here"), h("dd", {}, `${words(seconds(spent))}, with ${digits(sent / 1e6)} MB sent and ${digits((m * n * BYTES[given.dtype === "fp64" ? "fp64" : "fp32"]) / 1e6)} MB back`),
          times.compute ? [h("dt", {}, "rate while computing"), h("dd", {}, words(flops(work / times.compute)))] : null),
        h("h4", {}, "D begins"),
        h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "The first entries of D" }, h("table", { class: "matrix" }, h("tbody", {}, corner.map((row) => h("tr", {}, row.map((x) => h("td", { class: "num" }, exact ? String(x) : digits(x))))))))),
      h("div", { class: "panel wide" }, h("h3", {}, "What the selector weighed"),
        table("Candidates", ["variant", "time", "from", "why not"], [...choice.candidates]
          .sort((x, y) => (x.seconds ?? Infinity) - (y.seconds ?? Infinity))
          .map((c) => ({ mark: c.variant === choice.variant ? "chosen" : "", cells: [c.variant, words(seconds(c.seconds)), c.seconds === null ? "" : c.measured ? "measured" : "estimate", c.because ?? ""] })), [1])));
  }

  form.addEventListener("submit", send);
  return {
    async enter() {
      try {
        const { variants } = await api.get("/variants");
        const chosen = variant.value;
        fill(variant, h("option", { value: "auto" }, "the selector's choice"),
          variants.map((each) => h("option", { value: each.name }, each.name + (each.state === "admitted" ? "" : ` (${each.state})`))));
        variant.value = [...variant.options].some((each) => each.value === chosen) ? chosen : "auto";
      } catch (error) {
        fill(answer, h("div", { class: "panel wide bad", role: "alert" }, h("p", {}, error.message)));
      }
    },
  };
}
