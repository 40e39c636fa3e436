// Joins the events of concurrent calls to lists: a message and a confirm of its own would cost the broker more than all
// other work on an event.

const EVENTS_MAX = 100;
const BYTES_MAX = 256 * 1024;

// Calls `send` with each list. An event goes at once if the last list went more than `groupMs` ago. Otherwise it goes when
// that time is over, or when its list is full.
export class Groups {
  #groupMs;
  #send;
  #open = [];
  #bytes = 0;
  #wentAt = -Infinity;
  #cancel = null;

  constructor(groupMs, send) {
    this.#groupMs = groupMs;
    this.#send = send;
  }

  // Adds an event of `exchange`, `routingKey`, `body`, `traceparent`, `isAlone`, `endsAt` and `entry`.
  add(event) {
    if (event.isAlone) return this.#send(joined([event]));
    const fits = this.#bytes + event.body.length <= BYTES_MAX && (this.#open[0] ?? event).exchange === event.exchange;
    if (!fits) this.flush();
    this.#open.push(event);
    this.#bytes += event.body.length;
    if (this.#open.length === EVENTS_MAX) return this.flush();
    const waitMs = this.#wentAt + this.#groupMs - performance.now();
    // Calls of one turn of the event loop go together.
    this.#cancel ??= waitMs > 0 ? timeout(() => this.flush(), waitMs) : immediate(() => this.flush());
  }

  // Sends what waits.
  flush() {
    this.#cancel?.();
    this.#cancel = null;
    if (this.#open.length === 0) return;
    const events = this.#open;
    [this.#open, this.#bytes, this.#wentAt] = [[], 0, performance.now()];
    this.#send(joined(events));
  }
}

// Both return a function that cancels the call.
function timeout(call, ms) {
  const timer = setTimeout(call, ms);
  return () => clearTimeout(timer);
}

function immediate(call) {
  const timer = setImmediate(call);
  return () => clearImmediate(timer);
}

// Returns the message of a list, its deadline, and the entries of its calls. A list of one event is this event. The first
// event's routing key is that of the list: tallyd takes each event from any partition.
function joined(events) {
  const [{ exchange, routingKey, body, traceparent }] = events;
  // Each call also has its own timer.
  const endsAt = Math.max(...events.map((event) => event.endsAt));
  const entries = events.map(({ entry }) => entry);
  if (events.length === 1) return { message: { exchange, routingKey, body, traceparent }, endsAt, entries };
  const list = Buffer.from(`[${events.map(traced).join()}]`);
  return { message: { exchange, routingKey, body: list }, endsAt, entries };
}

// Returns the event's JSON. A list has only one header, so that the event itself keeps its trace, as its first field.
function traced({ body, traceparent }) {
  return traceparent ? `{"traceparent":"${traceparent}",${body.slice(1)}` : body;
}
