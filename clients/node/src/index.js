// Publishes likes and counts to tallyd, and reads the numbers.

import { randomUUID } from 'node:crypto';
import { DEFAULT, REASONS } from './card.js';
import { PublishManyError, RefusedError, TallydError } from './errors.js';
import { aName, anId, checked, Clock } from './events.js';
import { Gateway } from './gateway.js';
import { Publisher } from './publisher.js';
import { Reader } from './reader.js';
import { ToGateway, ToRabbitmq } from './sender.js';

export * from './errors.js';

const DEFAULTS = { keyPrefix: 'tally:', deadlineMs: 5_000, heartbeatS: 5, inFlightMax: 1_000, groupMs: 2 };

const TRACEPARENT = /^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$/;

export class Tallyd {
  #settings;
  #clock = new Clock();
  #sender = null;
  #gateway = null;
  #reader = null;
  #isClosed = false;

  constructor(settings = {}) {
    this.#settings = { ...DEFAULTS, ...settings };
    const { keyPrefix, deadlineMs, groupMs, gateway, token, redisUrl } = this.#settings;
    if (!(deadlineMs > 0)) throw new TypeError(`deadlineMs is ${deadlineMs}, allowed is a number above 0`);
    if (!(groupMs >= 0 && groupMs < deadlineMs)) throw new TypeError(`groupMs is ${groupMs}, allowed is a number from 0 to below deadlineMs`);
    if (gateway) this.#gateway = new Gateway(gateway, token, deadlineMs);
    if (redisUrl) this.#reader = new Reader(redisUrl, keyPrefix, deadlineMs);
  }

  async close() {
    this.#isClosed = true;
    this.#gateway?.close();
    this.#reader?.close();
    await this.#sender?.close();
  }

  // ---------------------------------------------------------------- publishing

  async like(kind, targetId, userId, { at } = {}) {
    return this.#publishNew({ type: 'like', kind, target_id: targetId, user_id: userId, at });
  }

  async unlike(kind, targetId, userId, { at } = {}) {
    return this.#publishNew({ type: 'unlike', kind, target_id: targetId, user_id: userId, at });
  }

  async count(kind, targetId, metric, delta = 1, { eventId, at } = {}) {
    return this.#publishNew({ type: 'count', kind, target_id: targetId, metric, delta, event_id: eventId, at });
  }

  async set(kind, targetId, metric, value, { at } = {}) {
    return this.#publishNew({ type: 'set', kind, target_id: targetId, metric, value, at });
  }

  async reset(kind, targetId, metric, { at } = {}) {
    return this.#publishNew({ type: 'reset', kind, target_id: targetId, metric, at });
  }

  // Publishes an event again, for instance the event of an error, or an event that a script has counted. The event keeps
  // its `at`, because with a new `at` it would be another event.
  async publish(event) {
    return one(await this.#publish((card) => [checked(event, card)]));
  }

  // Publishes a list of events. An event without `at` gets the current time. A count
  // without `event_id` gets a new id.
  async publishMany(events) {
    const given = [...events].map((event) => this.#completed(event));
    // Check all events before publishing the first event.
    const checkedList = (card) =>
      given.map(({ event, isNew }, place) => {
        try {
          return checked(event, card, isNew);
        } catch (error) {
          throw error instanceof RefusedError ? new RefusedError(error.reason, `event ${place} of the list: ${error.problem}`) : error;
        }
      });
    const results = await this.#publish(checkedList);
    if (results.some((result) => result instanceof TallydError)) throw new PublishManyError(results);
    return results;
  }

  async #publishNew(event) {
    const { event: given } = this.#completed(event);
    return one(await this.#publish((card) => [checked(given, card, true)]));
  }

  #completed(event) {
    const eventId = event.type === 'count' ? { event_id: event.event_id ?? randomUUID() } : {};
    return { event: { ...event, ...eventId, at: event.at ?? this.#clock.at() }, isNew: (event.at ?? null) === null };
  }

  async #publish(check) {
    const endsAt = performance.now() + this.#settings.deadlineMs;
    const sender = this.#connected();
    const [card, events] = await this.#withCard((known) => [known, check(known)]);
    const traceparent = this.#settings.traceparent?.();
    return sender.publish(events, card, endsAt, TRACEPARENT.test(traceparent) ? traceparent : undefined);
  }

  #connected() {
    this.#mustBeOpen();
    const { amqpUrl, deadlineMs, heartbeatS, inFlightMax, groupMs } = this.#settings;
    if (!amqpUrl && !this.#gateway) throw new TypeError('no server to publish to: pass amqpUrl or gateway');
    this.#sender ??= amqpUrl ? new ToRabbitmq(new Publisher({ amqpUrl, deadlineMs, heartbeatS, inFlightMax, groupMs })) : new ToGateway(this.#gateway);
    return this.#sender;
  }

  #mustBeOpen() {
    if (this.#isClosed) throw new Error('the client is closed: create another one');
  }

  // Calls `use` with the site's card. If the card refuses the call, reads the card again and tries once more.
  async #withCard(use) {
    this.#mustBeOpen();
    if (!this.#reader) return use(DEFAULT);
    try {
      return use(await this.#reader.card());
    } catch (error) {
      if (!REASONS.includes(error.reason)) throw error;
    }
    return use(await this.#reader.freshCard());
  }

  // ---------------------------------------------------------------- reading

  // Reads the number of each target. In the returned map, each key is an id as the caller passed it. `null` means that
  // the number is unknown, not zero.
  async counts(kind, targetIds, metric = 'like') {
    const given = [...targetIds];
    const ids = given.map((id) => anId(id));
    const card = await this.#withCard((known) => {
      aName(kind, 'kind', known.kinds);
      aName(metric, 'metric', known.metrics);
      return known;
    });
    if (ids.length === 0) return new Map();
    if (this.#gateway) return asGiven(given, ids, await this.#gateway.counters(kind, ids, metric));
    if (!this.#reader) throw new TypeError('no server to read from: pass redisUrl or gateway');
    return asGiven(given, ids, await this.#reader.counters(card, kind, ids, metric));
  }

  // Reads whether the user likes each target. Needs the gateway.
  async liked(kind, targetIds, userId) {
    const given = [...targetIds];
    const ids = given.map((id) => anId(id));
    return asGiven(given, ids, await this.#needsGateway().likes(kind, ids, anId(userId, 'user_id')));
  }

  // Reads a board's members with rank and score. Needs the gateway.
  async board(name, { period, top = 100, around, radius } = {}) {
    const asked = { period, top, around, radius };
    const query = Object.fromEntries(Object.entries(asked).filter(([, value]) => value !== undefined));
    return this.#needsGateway().get(`/v1/boards/${encodeURIComponent(name)}`, query);
  }

  #needsGateway() {
    if (!this.#gateway) throw new TypeError('only the gateway can read this: pass gateway');
    return this.#gateway;
  }
}

// Supports `await using`, if this version of Node has it.
if (Symbol.asyncDispose) {
  Object.defineProperty(Tallyd.prototype, Symbol.asyncDispose, {
    value() {
      return this.close();
    },
  });
}

function one([result]) {
  if (result instanceof TallydError) throw result;
  return result;
}

const asGiven = (given, ids, found) => new Map(given.map((key, place) => [key, found.get(ids[place]) ?? null]));
