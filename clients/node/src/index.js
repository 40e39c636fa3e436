// Publishes likes and counts to tallyd, and reads the numbers.

import { randomUUID } from 'node:crypto';
import { PublishManyError, RefusedError, TallydError } from './errors.js';
import { aName, anId, checked, Clock } from './events.js';
import { Gateway } from './gateway.js';
import { Publisher } from './publisher.js';
import { Reader } from './reader.js';
import { Sender } from './sender.js';
import { Writers } from './writers.js';

export * from './errors.js';

// The daemon's defaults.
const DEFAULTS = {
  prefix: 'tally',
  partitionBy: 'user',
  keyPrefix: 'tally:',
  bucketBits: 13,
  deadlineMs: 5_000,
  heartbeatS: 5,
  inFlightMax: 1_000,
};

export class Tallyd {
  #settings;
  #metrics;
  #clock = new Clock();
  #sender = null;
  #gateway = null;
  #reader = null;
  #isClosed = false;

  constructor(settings = {}) {
    this.#settings = { ...DEFAULTS, ...settings };
    const { partitionBy, keyPrefix, bucketBits, deadlineMs, metrics, gateway, token, redisUrl } = this.#settings;
    if (!['user', 'target'].includes(partitionBy)) throw new TypeError(`partitionBy is ${partitionBy}, allowed are 'user' and 'target'`);
    if (!(deadlineMs > 0)) throw new TypeError(`deadlineMs is ${deadlineMs}, allowed is a number above 0`);
    this.#metrics = { like: 1, ...metrics };
    if (gateway) this.#gateway = new Gateway(gateway, token, deadlineMs);
    if (redisUrl) this.#reader = new Reader(redisUrl, { keyPrefix, bucketBits, metrics: this.#metrics }, deadlineMs);
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

  // Publishes an event again, for instance the event of an error. The event keeps its `at`, because with a new `at` it
  // would be another event.
  async publish(event) {
    const known = this.#checked(event);
    const [result] = await this.#connected().publish([known], this.#settings.traceparent?.());
    if (result instanceof TallydError) throw result;
    return result;
  }

  // Publishes a list of events, with one message per event. An event without `at` gets the current time. A count
  // without `event_id` gets a new id.
  async publishMany(events) {
    // Check all events before publishing the first event.
    const known = [...events].map((event, place) => {
      try {
        return this.#checked(this.#completed(event));
      } catch (error) {
        throw error instanceof RefusedError ? new RefusedError(error.reason, `event ${place} of the list: ${error.problem}`) : error;
      }
    });
    const results = await this.#connected().publish(known, this.#settings.traceparent?.());
    if (results.some((result) => result instanceof TallydError)) throw new PublishManyError(results);
    return results;
  }

  #publishNew(event) {
    return this.publish(this.#completed(event));
  }

  #completed(event) {
    const eventId = event.type === 'count' ? { event_id: event.event_id ?? randomUUID() } : {};
    return { ...event, ...eventId, at: event.at ?? this.#clock.at() };
  }

  #checked(event) {
    const { kinds, metrics } = this.#settings;
    return checked(event, kinds, metrics && Object.keys(metrics));
  }

  #connected() {
    if (this.#isClosed) throw new Error('the client is closed: create another one');
    const { prefix, amqpUrl, deadlineMs, heartbeatS, inFlightMax, partitionBy } = this.#settings;
    if (!amqpUrl && !this.#gateway) throw new TypeError('no server to publish to: pass amqpUrl or gateway');
    if (this.#sender) return this.#sender;
    const publisher = amqpUrl ? new Publisher({ amqpUrl, exchange: `${prefix}.events`, deadlineMs, heartbeatS, inFlightMax }) : null;
    const reader = this.#reader;
    const writers = reader && new Writers(() => reader.writers());
    this.#sender = new Sender({ publisher, gateway: this.#gateway, writers, partitionBy, deadlineMs });
    return this.#sender;
  }

  // ---------------------------------------------------------------- reading

  // Reads the number of each target. In the returned map, each key is an id as the caller passed it. `null` means that
  // the number is unknown, not zero.
  async counts(kind, targetIds, metric = 'like') {
    const { given, ids } = this.#asked(kind, targetIds);
    if (ids.length === 0) return new Map();
    if (!this.#gateway && !Object.hasOwn(this.#metrics, metric)) {
      throw new RefusedError('unknown-metric', `the code of '${metric}' is unknown: pass metrics: { like: 1, ${metric}: CODE }`);
    }
    const reader = this.#gateway ?? this.#reader;
    if (!reader) throw new TypeError('no server to read from: pass redisUrl or gateway');
    return asGiven(given, ids, await reader.counters(kind, ids, metric));
  }

  // Reads whether the user likes each target. Needs the gateway.
  async liked(kind, targetIds, userId) {
    const { given, ids } = this.#asked(kind, targetIds);
    return asGiven(given, ids, await this.#needsGateway().likes(kind, ids, anId(userId, 'user_id')));
  }

  // Reads a board's members with rank and score. Needs the gateway.
  async board(name, { period, top = 100, around, radius } = {}) {
    const asked = { period, top, around, radius };
    const query = Object.fromEntries(Object.entries(asked).filter(([, value]) => value !== undefined));
    return this.#needsGateway().get(`/v1/boards/${encodeURIComponent(name)}`, query);
  }

  #asked(kind, targetIds) {
    aName(kind, 'kind', this.#settings.kinds);
    const given = [...targetIds];
    return { given, ids: given.map((id) => anId(id)) };
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

const asGiven = (given, ids, found) => new Map(given.map((key, place) => [key, found.get(ids[place]) ?? null]));
