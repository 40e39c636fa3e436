// Publishes events: to RabbitMQ, or over HTTP through the gateway if the client has no `amqpUrl`.

import { GatewayError, LimitedError, PublishError, RefusedError, RejectedError, UnconfirmedError } from './errors.js';
import { routingKeyOf } from './events.js';
import { EVENTS_MAX, NoAnswer, NotSent } from './gateway.js';

const PAUSE_MS = 100;

export class ToRabbitmq {
  #publisher;

  constructor(publisher) {
    this.#publisher = publisher;
  }

  // Resolves with the result of each event, in order. `endsAt` is the deadline on the clock `performance.now()`.
  async publish(events, card, endsAt, traceparent) {
    const resultOf = async (event) => {
      const { exchange, partitionBy } = card;
      const body = Buffer.from(JSON.stringify(event));
      const message = { exchange, routingKey: routingKeyOf(event, partitionBy), body, traceparent, isAlone: partitionBy !== 'user' };
      try {
        await this.#publisher.publish(event, message, endsAt - performance.now());
        return event;
      } catch (error) {
        if (error instanceof PublishError) return error;
        throw error;
      }
    };
    return Promise.all(events.map(resultOf));
  }

  async close() {
    await this.#publisher.close();
  }
}

// Publishes with POST /v1/events. Sends an event again only if the gateway said that it has not confirmed it.
export class ToGateway {
  #gateway;
  #isClosed = false;

  constructor(gateway) {
    this.#gateway = gateway;
  }

  // Resolves with the result of each event, in order. `endsAt` is the deadline on the clock `performance.now()`.
  async publish(events, _card, endsAt, traceparent) {
    const results = [];
    for (let first = 0; first < events.length; first += EVENTS_MAX) {
      results.push(...(await this.#posted(events.slice(first, first + EVENTS_MAX), endsAt, traceparent)));
    }
    return results;
  }

  async #posted(events, endsAt, traceparent) {
    const results = Array(events.length).fill(null);
    let left = [...events.keys()];
    let why = 'no answer';
    while (left.length > 0 && performance.now() < endsAt && !this.#isClosed) {
      try {
        const verdicts = await this.#gateway.publish(left.map((place) => events[place]), endsAt - performance.now(), traceparent);
        left.forEach((place, index) => (results[place] = judged(events[place], verdicts[index])));
        left = left.filter((place) => !results[place]);
        why = verdicts.find(({ verdict }) => verdict === 'unconfirmed')?.message ?? why;
      } catch (error) {
        if (error instanceof GatewayError) return events.map((event, place) => results[place] ?? rejected(event, error));
        if (!(error instanceof NotSent) && !(error instanceof NoAnswer)) throw error;
        why = error.message;
        if (error instanceof NoAnswer) break;
      }
      if (left.length > 0) await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
    }
    return events.map((event, place) => results[place] ?? unconfirmed(event, why));
  }

  async close() {
    this.#isClosed = true;
  }
}

// Returns the result, or `null` if the gateway has not confirmed the event.
function judged(event, { verdict, reason, message, wait_ms: waitMs }) {
  if (verdict === 'confirmed') return event;
  if (verdict === 'refused') return new RefusedError(reason, message);
  if (verdict === 'limited') return new LimitedError(`the user clicks too often: publish \`event\` again in ${waitMs} ms`, event, waitMs);
  return null;
}

const rejected = (event, cause) => new RejectedError(`${cause.message}. Fix the cause, then publish \`event\` again`, event, { cause });

const unconfirmed = (event, why) =>
  new UnconfirmedError(`the gateway did not confirm the event (${why}). It may have arrived: publish \`event\` again, which is safe`, event);
