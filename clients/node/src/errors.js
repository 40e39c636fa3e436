// Errors. Each says what to do.

class Named extends Error {
  get name() {
    return this.constructor.name;
  }
}

// Base class of all errors of this package.
export class TallydError extends Named {}

// An argument is not valid. Nothing was sent. `reason` is the daemon's name for it, as in docs/events.md.
export class RefusedError extends TallydError {
  constructor(reason, problem) {
    super(`${reason}: ${problem}`);
    this.reason = reason;
  }
}

// The broker did not confirm `event`. Call `site.publish(error.event)` to publish the same event again.
export class PublishError extends TallydError {
  constructor(message, event, options) {
    super(message, options);
    this.event = event;
  }
}

// No confirm arrived before the deadline. The broker can have the event all the same.
export class UnconfirmedError extends PublishError {}

// The broker rejected the event. Fix the cause first, then publish the event again.
export class RejectedError extends PublishError {}

// A queue rejected the event, for instance because it is full.
export class NackedError extends RejectedError {}

// No queue takes the event: exchange or queues do not exist.
export class ReturnedError extends RejectedError {}

// Redis or the gateway did not answer. The number is unknown, not zero.
export class ReadError extends TallydError {}

// The gateway rejected the request. `code` is the gateway's name for the problem.
export class GatewayError extends ReadError {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}
