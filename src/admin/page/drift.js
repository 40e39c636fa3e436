// Draws drift over time, with one bar for each reconcile. The height of a bar is the number of drifted counters. The
// filled part of the bar is the number of repairs.

class Drift {
  constructor(id) {
    this.runs = [];
    this.chosen = null;
    this.svg = make("svg:svg", { height: String(HEIGHT) });
    this.slider = new Slider(this.svg, "Drift found by reconciles", (place) => this.choose(place));
    this.values = ["drifted", "repaired"].map(() => make("span"));
    this.run = make("span");
    const key = (style, words, place) => make("span", {}, make("span", { class: style, "aria-hidden": "true" }), words, this.values[place]);
    const keys = [key("key two", "drifted ", 0), key("key", "repaired ", 1)];
    byId(id).append(
      make("figcaption", {}, make("span", { class: "title" }, "Drift by run"), ...keys, this.run),
      this.slider.element,
    );
    this.svg.addEventListener("pointermove", (event) => this.choose(Math.floor((event.offsetX - LEFT) / this.step)));
    this.svg.addEventListener("pointerleave", () => this.choose(null));
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  show(runs) {
    const told = JSON.stringify(runs);
    if (this.told === told) return;
    Object.assign(this, { told, runs });
    this.draw();
  }

  choose(place) {
    this.chosen = this.runs[place] ? place : null;
    this.bars?.forEach((bar, at) => bar.classList.toggle("chosen", at === this.chosen));
    const run = this.runs[this.chosen];
    const all = (of) => count(run ? run[of] : this.runs.reduce((sum, one) => sum + one[of], 0));
    this.values[0].textContent = all("drifted");
    this.values[1].textContent = all("repaired");
    this.run.textContent = run ? `${clock(run.ended_at)} ${run.mode} ${run.outcome}` : `in ${this.runs.length} runs`;
    const words = `${all("drifted")} of ${all("checked")} drifted, ${all("repaired")} repaired`;
    this.slider.say(this.chosen, this.runs.length, this.runs.length ? `${this.run.textContent}: ${words}` : "no run has ended yet");
  }

  draw() {
    const width = this.svg.clientWidth;
    if (!width) return;
    const most = nice(Math.max(4, ...this.runs.map((run) => run.drifted)));
    const [base, room] = [HEIGHT - BOTTOM, HEIGHT - BOTTOM - TOP];
    const high = (value) => (value / most) * room;
    this.step = (width - LEFT - RIGHT) / Math.max(this.runs.length, 20);
    const bar = (run, place, of, style) => {
      const height = Math.max(high(run[of]), run[of] ? 2 : 0);
      return make("svg:rect", { class: style, x: LEFT + place * this.step + 1, width: Math.max(this.step - 3, 2), y: base - height, height });
    };
    const axes = [0, most / 2, most].flatMap((value) => [
      make("svg:line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: base - high(value), y2: base - high(value) }),
      make("svg:text", { x: LEFT - 6, y: base - high(value) + 4, "text-anchor": "end" }, count(value)),
    ]);
    this.bars = this.runs.map((run, place) => bar(run, place, "drifted", "bar"));
    const repaired = this.runs.map((run, place) => bar(run, place, "repaired", "bar repaired"));
    const clean = this.runs.map((run, place) =>
      make("svg:rect", { class: "bar clean", x: LEFT + place * this.step + 1, width: Math.max(this.step - 3, 2), y: base - 1, height: 2 }),
    );
    const failed = this.runs.flatMap((run, place) =>
      run.outcome === "done"
        ? []
        : [make("svg:text", { class: "failed", x: LEFT + (place + 0.5) * this.step, y: base - 4, "text-anchor": "middle" }, "×")],
    );
    this.svg.replaceChildren(...axes, ...clean, ...repaired, ...this.bars, ...failed);
    this.choose(this.chosen);
  }
}
