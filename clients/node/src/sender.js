// Sends events to RabbitMQ. If API servers must count the number, the event goes to the gateway instead, and the
// gateway counts the number.
//
// The gateway must answer within half of `deadlineMs`. If the gateway does not answer in this time, the client sends
// the same event to RabbitMQ, so the event is not lost. If the event's number in Redis is then wrong, the next
// reconcile corrects it.

import { GatewayError, LimitedError, PublishError, RefusedError, RejectedError, UnconfirmedError } from './errors.js';
import { numberOf, routingKeyOf } from './events.js';
import { Busy, EVENTS_MAX, NoAnswer } from './gateway.js';

const PAUSE_MS = 100;

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

export class Sender {
  #publisher;
  #gateway;
  #writers;
  #settings;
  #warned = new Set();
  #isGatewayFailing = false;

  constructor({ publisher, gateway, writers, partitionBy, deadlineMs }) {
    this.#publisher = publisher;
    this.#gateway = gateway;
    this.#writers = writers;
    this.#settings = { partitionBy, deadlineMs };
  }

  // Resolves when the broker has all events on disk, in a queue, or when the deadline has passed. For each event, the
  // result has the event as it was published, or an error.
  async publish(events, traceparent) {
    const endsAt = performance.now() + this.#settings.deadlineMs;
    const byApi = (await this.#writers?.byApi()) ?? new Set();
    const sent = events.map((event) => ({ event, traceparent, result: null, why: 'no answer' }));
    const isCounted = ({ event }) => byApi.has(numberOf(event));
    const isForGateway = (one) => !this.#publisher || (this.#gateway && isCounted(one));
    const plain = sent.filter((one) => !isForGateway(one));
    plain.filter(isCounted).forEach(({ event }) => this.#warn(numberOf(event)));
    await Promise.all([this.#toRabbitmq(plain, endsAt), this.#toGateway(sent.filter(isForGateway), endsAt)]);
    return sent.map(({ result }) => result);
  }

  #warn(number) {
    if (this.#warned.has(number)) return;
    this.#warned.add(number);
    const message = `API servers count ${number} in Redis, and this client has no gateway to count it. The client publishes the events, but the number in Redis changes only with the next reconcile. Pass gateway: URL of \`tallyd gateway\`.`;
    process.emitWarning(message, { type: 'TallydWarning', code: 'TALLYD_NOT_COUNTED' });
  }

  // ---------------------------------------------------------------- RabbitMQ

  async #toRabbitmq(sent, endsAt) {
    await Promise.all(sent.map((one) => this.#confirmed(one, endsAt)));
  }

  async #confirmed(one, endsAt) {
    const { event, traceparent } = one;
    try {
      const body = Buffer.from(JSON.stringify(event));
      const routingKey = routingKeyOf(event, this.#settings.partitionBy);
      await this.#publisher.publish(event, routingKey, body, endsAt - performance.now(), traceparent);
      one.result = event;
    } catch (error) {
      if (!(error instanceof PublishError)) throw error;
      one.result = error;
    }
  }

  // ---------------------------------------------------------------- the gateway

  async #toGateway(sent, endsAt) {
    const until = this.#publisher ? endsAt - this.#settings.deadlineMs / 2 : endsAt;
    for (let first = 0; first < sent.length; first += EVENTS_MAX) await this.#judged(sent.slice(first, first + EVENTS_MAX), until);
    const left = sent.filter(({ result }) => !result);
    if (this.#publisher && left.length > 0) {
      if (!this.#isGatewayFailing) {
        const message = `the gateway failed: ${left[0].why}. Events go directly to RabbitMQ, and the next reconcile corrects the numbers in Redis.`;
        process.emitWarning(message, { type: 'TallydWarning', code: 'TALLYD_GATEWAY_FAILED' });
      }
      await this.#toRabbitmq(left, endsAt);
    }
    for (const one of sent) one.result ??= this.#unconfirmed(one);
    if (sent.length > 0) this.#isGatewayFailing = left.length > 0;
  }

  // Sets the results of all events that the gateway has accepted or rejected.
  async #judged(sent, until) {
    let left = sent;
    while (left.length > 0 && performance.now() < until) {
      left = await this.#asked(left, until - performance.now());
      if (left.length > 0) await pause(PAUSE_MS);
    }
  }

  // Resolves with the events that can be sent to the gateway again.
  async #asked(sent, timeoutMs) {
    try {
      const verdicts = await this.#gateway.publish(sent.map(({ event }) => event), timeoutMs, sent[0].traceparent);
      sent.forEach((one, place) => judge(one, verdicts[place]));
    } catch (error) {
      if (error instanceof GatewayError) {
        const message = `${error.message}. Fix the cause, then publish \`event\` again`;
        for (const one of sent) one.result = new RejectedError(message, one.event, { cause: error });
      } else if (error instanceof NoAnswer) {
        for (const one of sent) one.why = error.message;
        // Don't send a count again: Redis may have counted the event already, and would then count it twice. MySQL
        // counts its `event_id` once.
        if (this.#publisher && !(error instanceof Busy)) return sent.filter(({ event }) => event.type !== 'count');
      } else throw error;
    }
    return sent.filter(({ result }) => !result);
  }

  #unconfirmed({ event, why }) {
    const message = `the gateway did not confirm the event in ${this.#settings.deadlineMs} ms (${why}). It may have arrived: publish \`event\` again, which is safe`;
    return new UnconfirmedError(message, event);
  }

  async close() {
    await this.#publisher?.close();
  }
}

function judge(one, { verdict, at, reason, message, wait_ms: waitMs }) {
  if (verdict === 'confirmed') one.result = { ...one.event, at };
  else if (verdict === 'refused') one.result = new RefusedError(reason, message);
  else if (verdict === 'limited') one.result = new LimitedError(`the user clicks too often: publish \`event\` again in ${waitMs} ms`, one.event, waitMs);
  else one.why = message;
}
