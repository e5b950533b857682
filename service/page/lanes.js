// Lanes: receives one timeline, hands on a canvas with a lane for each role and engine, and a moving moment.

import { fill, h } from "./dom.js";

const TALL = 27;
const TOP = 20;
const COLOUR = { TMA: "--tma", "tensor core": "--mma", "tensor memory": "--wb", "TMA store": "--wb" };
const BARRIERS = { tma2mma: "--tma", mma2tma: "--mma", mma2ld: "--bar", ld2mma: "--wb" };

const roleColour = (name) => (name.startsWith("TMA") ? "--tma" : name.startsWith("write") ? "--wb" : name.startsWith("one") ? "--team" : "--mma");

export class Lanes {
  constructor(title) {
    this.title = title;
    this.scale = 1;
    this.names = h("ol", { class: "names" });
    this.still = h("canvas", { role: "img" });
    this.moving = h("canvas", { "aria-hidden": "true", class: "over" });
    this.stage = h("div", { class: "stage", tabindex: "0", role: "region", "aria-label": `Timeline, ${title}` }, this.still, this.moving);
    this.node = h("div", { class: "lanes" }, this.names, this.stage);
    new ResizeObserver(() => this.line && this.stage.clientWidth !== this.drawnFor && (this.draw(), this.at(this.t ?? 0))).observe(this.stage);
  }

  set(line, span) {
    this.line = line;
    this.span = span;
    this.order = new Map(line.lanes.map((lane, at) => [lane.name, at]));
    const spacer = h("li", { "aria-hidden": "true" });
    spacer.style.height = `${TOP}px`;
    fill(this.names, spacer, line.lanes.map((lane) => {
      const item = h("li", {}, lane.name);
      item.style.height = `${TALL}px`;
      item.style.color = `var(${COLOUR[lane.name] ?? roleColour(lane.name)})`;
      return item;
    }));
    const busy = Math.round(100 * (line.kpis.steady["tensor core"] ?? 0));
    this.still.setAttribute("aria-label", `${this.title}: ${line.lanes.map((lane) => lane.name).join(", ")}; tensor core busy ${busy} % between the first and the last product`);
    this.draw();
  }

  zoom(scale) {
    this.scale = scale;
    if (this.line) this.draw();
  }

  x(t) { return 4 + (t / this.span) * (this.width - 8); }
  y(name) { return TOP + TALL * (this.order.get(name) ?? 0); }

  draw() {
    if (!this.line || !this.stage.clientWidth) return;
    this.drawnFor = this.stage.clientWidth;
    const ratio = Math.min(2, window.devicePixelRatio || 1);
    this.width = Math.min(15000, this.drawnFor * this.scale);
    this.height = TOP + TALL * this.line.lanes.length + 6;
    const style = getComputedStyle(document.documentElement);
    this.ink = (name) => style.getPropertyValue(name).trim();
    for (const canvas of [this.still, this.moving]) {
      // The moving layer covers what is seen only: clearing a long canvas each frame would cost the frame.
      const width = canvas === this.still ? this.width : this.drawnFor;
      canvas.width = width * ratio;
      canvas.height = this.height * ratio;
      canvas.style.width = `${width}px`;
      canvas.style.height = `${this.height}px`;
      canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    const g = this.still.getContext("2d");
    g.clearRect(0, 0, this.width, this.height);
    g.font = "11px system-ui, sans-serif";
    this.ruler(g);
    this.line.lanes.forEach((lane, at) => {
      g.fillStyle = this.ink(lane.kind === "engine" ? "--faint" : "--panel");
      g.fillRect(0, TOP + TALL * at + 2, this.width, TALL - 4);
    });
    for (const wait of this.line.waits) if (wait.end !== wait.begin) this.wait(g, wait);
    for (const span of this.line.spans) this.bar(g, span);
    const room = this.width / Math.max(1, this.line.handoffs.length) * (this.line.nanoseconds / this.span);
    for (const handoff of this.line.handoffs) this.arrow(g, handoff, 0, room > 24 ? 0.6 : room > 10 ? 0.3 : 0.14);
  }

  ruler(g) {
    const wanted = this.span / Math.max(2, this.width / 90);
    const step = [50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000].find((each) => each >= wanted) ?? 50000;
    g.fillStyle = this.ink("--muted");
    for (let t = 0; t <= this.span; t += step) {
      g.fillRect(this.x(t), TOP - 4, 1, 4);
      if (this.x(t) < this.width - 44) g.fillText(`${t / 1000} µs`, this.x(t) + 3, 12);
    }
  }

  wait(g, wait) {
    const begin = this.x(wait.begin);
    const end = this.x(wait.end ?? this.span);
    const y = this.y(wait.lane) + 9;
    g.fillStyle = this.ink(wait.end === null ? "--bad" : "--wait");
    g.fillRect(begin, y, Math.max(1, end - begin - 0.5), TALL - 18);
    if (end - begin > 64) {
      g.fillStyle = this.ink(wait.end === null ? "--panel" : "--text");
      g.font = "9px system-ui, sans-serif";
      g.fillText(`${wait.barrier}[${wait.index}]`, begin + 3, y + 7.5);
      g.font = "11px system-ui, sans-serif";
    }
  }

  bar(g, span) {
    const begin = this.x(span.begin);
    const wide = Math.max(1, this.x(span.end) - begin);
    const y = this.y(span.lane) + 4;
    const colour = this.ink(COLOUR[span.lane] ?? roleColour(span.lane));
    if (span.what === "load") {
      g.fillStyle = colour;
      g.globalAlpha = 0.25;
      g.fillRect(this.x(span.asked), y + 7, begin - this.x(span.asked), 4);
      g.globalAlpha = 1;
    }
    if (span.by && this.order.has(span.by)) {
      // the moment at which a role asked the engine for it
      g.fillStyle = this.ink(roleColour(span.by));
      g.fillRect(this.x(span.asked) - 0.5, this.y(span.by) + 4, 2, TALL - 9);
    }
    g.globalAlpha = span.what === "stage" ? 0.55 : span.consumer === 1 || (span.k ?? 0) % 2 ? 0.78 : 1;
    g.fillStyle = colour;
    g.fillRect(begin, y, Math.max(1, wide - 0.8), TALL - 9);
    g.globalAlpha = 1;
    const label = span.k === undefined ? span.what : `k${span.k}`;
    if (wide > 7 * label.length + 4) {
      g.fillStyle = this.ink("--panel");
      g.fillText(label, begin + 3, y + 13);
    }
  }

  arrow(g, handoff, thick, alpha) {
    const x = this.x(handoff.at);
    const end = this.x(handoff.until);
    const from = this.y(handoff.from) + TALL / 2;
    const to = this.y(handoff.to) + TALL / 2;
    const down = Math.sign(to - from) || 1;
    const tip = to - down * 5;
    g.strokeStyle = g.fillStyle = this.ink(BARRIERS[handoff.barrier]);
    g.lineWidth = 1 + thick;
    g.globalAlpha = alpha;
    g.beginPath();
    g.moveTo(x, from);
    g.lineTo(end, tip);
    g.stroke();
    g.beginPath();
    g.moveTo(end, to);
    g.lineTo(end - 3 - thick, tip);
    g.lineTo(end + 3 + thick, tip);
    g.fill();
    g.globalAlpha = 1;
  }

  at(t) {
    this.t = t;
    if (!this.width) return;
    const x = this.x(t);
    const seen = this.drawnFor;
    if (this.scale > 1) {
      const { scrollLeft } = this.stage;
      if (x < scrollLeft + 10 || x > scrollLeft + 0.8 * seen) this.stage.scrollLeft = Math.max(0, x - 0.3 * seen);
    }
    const shift = Math.max(0, Math.min(this.stage.scrollLeft, this.width - seen));
    this.moving.style.transform = `translateX(${shift}px)`;
    const g = this.moving.getContext("2d");
    g.clearRect(0, 0, seen, this.height);
    g.save();
    g.translate(-shift, 0);
    for (const handoff of this.line.handoffs) {
      if (handoff.at > t) break;
      if (t - handoff.at < Math.max(120, this.span * 0.012)) this.arrow(g, handoff, 1.5, 1);
    }
    g.fillStyle = this.ink("--bad");
    g.fillRect(x - 1, 0, 2, this.height);
    g.restore();
  }
}
