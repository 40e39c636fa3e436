// Turns a plot into a slider: arrow keys select a point of the plot, and a screen reader reads the point. The picture
// is hidden from screen readers, because the slider's text contains all values of a point.

const STEPS = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -6, PageUp: 6, Home: -Infinity, End: Infinity };

class Slider {
  /** `choose` gets the index of a point, or null if no point is selected. */
  constructor(svg, title, choose) {
    this.element = make("div", { role: "slider", tabindex: "0", "aria-label": title, "aria-valuemin": "0" }, svg);
    svg.setAttribute("aria-hidden", "true");
    this.say(null, 0, "unknown");
    // On focus, the last point is selected and stays selected. Otherwise the slider's text would change while a screen
    // reader reads the text aloud.
    this.element.addEventListener("focus", () => choose(this.last));
    this.element.addEventListener("blur", () => choose(null));
    this.element.addEventListener("keydown", (event) => {
      const by = STEPS[event.key];
      if (by === undefined) return;
      event.preventDefault();
      choose(Math.min(Math.max(this.place + by, 0), this.last));
    });
  }

  /** Sets the selected point, the number of points and the words for screen readers. */
  say(place, many, words) {
    this.last = Math.max(many - 1, 0);
    this.place = Math.max(place ?? this.last, 0);
    const told = { "aria-valuemax": this.last, "aria-valuenow": this.place, "aria-valuetext": words };
    for (const [name, value] of Object.entries(told)) this.element.setAttribute(name, String(value));
  }
}
