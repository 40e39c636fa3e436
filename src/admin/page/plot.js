// Plots of the last hour, as SVG with the width of their container. The pointer selects a time, and all plots show
// their values at this time.

const MINUTE = 60e6;
const HOUR = 60 * MINUTE;
// The periods that a plot can show, with their titles and the interval between times on the axis.
const REACHES = [
  { reach: 10 * MINUTE, words: "The last 10 minutes", step: 2 * MINUTE },
  { reach: 30 * MINUTE, words: "The last 30 minutes", step: 10 * MINUTE },
  { reach: HOUR, words: "The last hour", step: 15 * MINUTE },
];
// Points are ten seconds apart. If two points are further apart than this, the plot shows a gap between them.
const GAP = 16e6;
const [HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [150, 52, 6, 8, 18];

/** The smallest round number that is not below `value`, and whose half is also round. */
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 8, 10].map((step) => step * power).find((step) => step >= value * 0.9999);
}

const cursor = { at: null };
const plots = [];

/** The shortest period that contains all points, which are sorted by time. */
function reachOf(points) {
  const oldest = points.length ? points[0].at : Infinity;
  return REACHES.find(({ reach }) => oldest >= knownNow() - reach) ?? REACHES.at(-1);
}

/** Numbers over time. `series` are `{ name, label, of }`. The first line is solid, and the second line is dashed. */
class Plot {
  constructor(id, title, series, say, least) {
    Object.assign(this, { series, say, least, points: [], starts: [], reached: REACHES[0] });
    this.values = series.map(() => make("span"));
    const keys = series.map((one, place) => {
      const key = make("span", { class: place ? "key two" : "key", "aria-hidden": "true" });
      return make("span", {}, key, one.label ? `${one.label} ` : "", this.values[place]);
    });
    this.svg = make("svg:svg", { height: String(HEIGHT) });
    this.slider = new Slider(this.svg, title, (place) => point(this.points[place]?.at ?? null));
    byId(id).append(make("figcaption", {}, make("span", { class: "title" }, title), ...keys), this.slider.element);
    this.svg.addEventListener("pointermove", (event) => point(this.timeAt(event.offsetX)));
    this.svg.addEventListener("pointerleave", () => point(null));
    new ResizeObserver(() => this.draw()).observe(this.svg);
    plots.push(this);
  }

  show(points, starts) {
    Object.assign(this, { points, starts, reached: reachOf(points) });
    this.draw();
  }

  x(at) {
    return LEFT + ((at - this.from) / this.reached.reach) * (this.width - LEFT - RIGHT);
  }

  timeAt(x) {
    return this.from + ((x - LEFT) / (this.width - LEFT - RIGHT)) * this.reached.reach;
  }

  nearest(at) {
    const distance = (one) => Math.abs(one.at - at);
    return this.points.reduce((best, one) => (best && distance(best) <= distance(one) ? best : one), null);
  }

  draw() {
    this.width = this.svg.clientWidth;
    if (!this.width) return;
    this.from = knownNow() - this.reached.reach;
    const seen = this.points.filter((one) => one.at >= this.from);
    const values = seen.flatMap((one) => this.series.map((series) => series.of(one) ?? 0));
    this.most = nice(Math.max(this.least, ...values));
    const y = (value) => HEIGHT - BOTTOM - (value / this.most) * (HEIGHT - BOTTOM - TOP);
    this.y = y;
    this.marks = make("svg:g");
    this.svg.replaceChildren(...this.axes(y), ...this.gaps(seen), ...this.starting(), ...this.lines(seen, y), this.marks);
    this.point();
  }

  said(series, one) {
    const value = one ? series.of(one) : null;
    return value === null || value === undefined ? "–" : this.say(value);
  }

  axes(y) {
    const found = [];
    for (const value of [0, this.most / 2, this.most]) {
      found.push(make("svg:line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: y(value), y2: y(value) }));
      found.push(make("svg:text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, this.say(value)));
    }
    const { reach, step } = this.reached;
    for (let at = Math.ceil(this.from / step) * step; at <= this.from + reach; at += step) {
      const x = this.x(at);
      found.push(make("svg:line", { class: "grid", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }));
      if (x > LEFT + 12 && x < this.width - 18) {
        found.push(make("svg:text", { x, y: HEIGHT - 4, "text-anchor": "middle" }, clock(at).slice(0, 5)));
      }
    }
    return found;
  }

  /** The elements that mark periods without data: before the first point, and between distant points. */
  gaps(seen) {
    const ends = [{ at: this.from }, ...seen, { at: this.from + this.reached.reach }];
    const far = ends.slice(1).map((end, place) => [ends[place].at, end.at]).filter(([from, until]) => until - from > GAP);
    return far.flatMap(([from, until]) => {
      const [x, width] = [this.x(from), this.x(until) - this.x(from)];
      const words = make("svg:text", { x: x + width / 2, y: HEIGHT / 4 + 8, "text-anchor": "middle" }, "no data");
      return [make("svg:rect", { class: "gap", x, width, y: TOP, height: HEIGHT - TOP - BOTTOM }), ...(width > 80 ? [words] : [])];
    });
  }

  /** The lines that mark the starts of daemon processes. */
  starting() {
    const seen = this.starts.filter((at) => at >= this.from);
    return seen.map((at) =>
      make("svg:line", { class: "started", x1: this.x(at), x2: this.x(at), y1: TOP, y2: HEIGHT - BOTTOM }, make("svg:title", {}, `started ${utc(at)}`)),
    );
  }

  lines(seen, y) {
    return this.series.map((series, place) => {
      let [path, before] = ["", null];
      for (const one of seen) {
        const value = series.of(one);
        if (value === null || value === undefined) {
          before = null;
          continue;
        }
        const joined = before !== null && one.at - before <= GAP;
        const to = `${this.x(one.at).toFixed(1)} ${y(value).toFixed(1)}`;
        // A line without length is drawn as a dot.
        path += joined ? `L${to}` : `M${to}h0`;
        before = one.at;
      }
      return make("svg:path", { class: `series ${place ? "two" : "one"}`, d: path });
    });
  }

  /** Shows the values at the pointer, or the values of the last point. */
  point() {
    const one = cursor.at === null ? this.points.at(-1) : this.nearest(cursor.at);
    this.series.forEach((series, place) => {
      this.values[place].textContent = this.said(series, one);
    });
    const words = this.series.map((series) => `${series.name} ${this.said(series, one)}`).join(", ");
    const place = one ? this.points.indexOf(one) : 0;
    this.slider.say(place, this.points.length, one ? `${clock(one.at)} UTC: ${words}` : "unknown");
    this.marks?.replaceChildren(...(one && cursor.at !== null ? this.cursor(one) : []));
  }

  /** A line at the selected point, with the point's time. */
  cursor(one) {
    const x = this.x(one.at);
    const [side, anchor] = x > this.width / 2 ? [-4, "end"] : [4, "start"];
    return [
      make("svg:line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }),
      make("svg:text", { class: "read", x: x + side, y: TOP + 10, "text-anchor": anchor }, clock(one.at)),
    ];
  }
}

function point(at) {
  cursor.at = at;
  plots.forEach((plot) => plot.point());
}
