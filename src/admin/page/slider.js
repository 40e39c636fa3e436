// A plot's picture as a slider over its points: arrow keys choose one, and a screen reader says it. The picture itself is hidden from
// both: the words hold all that it shows of a point.

const STEPS = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -6, PageUp: 6, Home: -Infinity, End: Infinity };

class Slider {
  /** `choose` takes a place, or null where none is chosen any more. */
  constructor(svg, title, choose) {
    this.element = make("div", { role: "slider", tabindex: "0", "aria-label": title, "aria-valuemin": "0" }, svg);
    svg.setAttribute("aria-hidden", "true");
    this.say(null, 0, "not known yet");
    // Otherwise what is said would change while it is listened to.
    this.element.addEventListener("focus", () => choose(this.last));
    this.element.addEventListener("blur", () => choose(null));
    this.element.addEventListener("keydown", (event) => {
      const by = STEPS[event.key];
      if (by === undefined) return;
      event.preventDefault();
      choose(Math.min(Math.max(this.place + by, 0), this.last));
    });
  }

  /** Tells screen readers the chosen point, the number of points, and the words for it. */
  say(place, many, words) {
    this.last = Math.max(many - 1, 0);
    this.place = Math.max(place ?? this.last, 0);
    const told = { "aria-valuemax": this.last, "aria-valuenow": this.place, "aria-valuetext": words };
    for (const [name, value] of Object.entries(told)) this.element.setAttribute(name, String(value));
  }
}
