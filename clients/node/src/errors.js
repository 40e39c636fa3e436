// The errors of this package. Each message says what to do.

class Named extends Error {
  get name() {
    return this.constructor.name;
  }
}

// Base class of all errors of this package.
export class TallydError extends Named {}

// The call does not fit the site. Nothing was sent. `reason` is the daemon's code for the problem, as in docs/events.md,
// or `counted-by-api`: API servers must count this number with a script (docs/scripts.md).
export class RefusedError extends TallydError {
  constructor(reason, problem) {
    super(`${reason}: ${problem}`);
    this.reason = reason;
    this.problem = problem;
  }
}

// The broker did not confirm `event`. Call `site.publish(error.event)` to publish the same event again.
export class PublishError extends TallydError {
  constructor(message, event, options) {
    super(message, options);
    this.event = event;
  }
}

// No confirm arrived before the deadline. The broker may have the event nevertheless.
export class UnconfirmedError extends PublishError {}

// The broker rejected the event. Fix the cause first, then publish the event again.
export class RejectedError extends PublishError {}

// A queue rejected the event, for instance because it is full.
export class NackedError extends RejectedError {}

// No queue takes the event: the exchange or the queues do not exist.
export class ReturnedError extends RejectedError {}

// RabbitMQ refused the user or the password. The event was not sent.
export class LoginError extends RejectedError {}

// The user clicks more often than the gateway allows. The event can be published after `waitMs`.
export class LimitedError extends RejectedError {
  constructor(message, event, waitMs) {
    super(message, event);
    this.waitMs = waitMs;
  }
}

// Some events of a list were not confirmed. `results` has each event or its error, in order. To publish the unconfirmed
// events again, call `site.publishMany(error.events)`. `events` does not include refused events.
export class PublishManyError extends TallydError {
  constructor(results) {
    const errors = results.filter((result) => result instanceof TallydError);
    const counts = new Map();
    for (const { name } of errors) counts.set(name, (counts.get(name) ?? 0) + 1);
    const classes = [...counts].map(([name, count]) => `${name} ${count}`).join(', ');
    const message = `${errors.length} of ${results.length} events were not confirmed (${classes}). The first error: ${errors[0].message}`;
    super(message, { cause: errors[0] });
    this.results = results;
  }

  get events() {
    return this.results.filter((result) => result instanceof PublishError).map(({ event }) => event);
  }
}

// Redis or the gateway did not answer. The number is unknown, not zero.
export class ReadError extends TallydError {}

// The gateway rejected the request. `code` is the gateway's code for the problem.
export class GatewayError extends ReadError {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}
