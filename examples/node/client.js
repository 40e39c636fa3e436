// A client that likes targets. It counts each like once in Redis, immediately, and publishes the event that tallyd
// writes to MySQL. docs/scripts.md explains each step. like.js is a command that uses this client.
//
// Ids are text everywhere, because a JavaScript number above 2^53 loses its last digits.

import { createHash, randomUUID } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { setTimeout as sleep } from 'node:timers/promises';
import amqp from 'amqplib';
import { ClientOfflineError, createClient, ErrorReply } from 'redis';
import { boardKeys } from './board.js';
import { crc32 } from './crc32.js';
import { Late, Rows, within } from './rows.js';

const ID_MAX = 2n ** 63n - 1n;
const AT_MIN = 1262304000000000n; // 2010: an earlier time is probably in milliseconds
const AT_MAX = 253402300799999999n;
const TRIES = 3;
const PAUSE_MS = 100; // before the next try

const script = (name) => {
  const text = readFileSync(new URL(`../../lua/${name}.lua`, import.meta.url), 'utf8');
  return { text, sha1: createHash('sha1').update(text).digest('hex') };
};
const LIKE = script('like');
const TAKE_BACK = script('take_back');
const LIMIT = script('limit');
const BOARD = script('board');

// These settings must be as in tallyd's config.toml. The addresses can differ.
export const defaults = {
  redisUrl: 'redis://127.0.0.1:6379/0',
  amqpUrl: 'amqp://guest:guest@127.0.0.1:5672/%2f',
  mysqlUrl: 'mysql://root@127.0.0.1:3306/tally', // the primary server
  exchange: 'tally.events', // [amqp] prefix, then ".events"
  keyPrefix: 'tally:', // [redis] key_prefix
  bucketBits: 13, // [redis] bucket_bits
  like: 1, // [metrics] like
  metrics: ['view'], // the other names of [metrics]
  kinds: { video: 1, post: 2 }, // [kinds]
  filters: false, // with filters true: set it before [filter] likes_min
  board: '', // a [[board]] with the tie "member" that likes count on; empty for none
  boardPeriods: ['total'], // period of each [[board]] of that name
  // These settings must be the same for all API servers.
  rememberedS: 120, // longer than an event needs to reach MySQL
  clicksMax: 0, // of a user in a window; 0 for no limit
  windowMs: 60_000,
  // The timeout of a call to a server.
  timeoutMs: 5_000,
  // After a failure, MySQL gets no query during this time, so that not every request has to wait for MySQL.
  mysqlRestMs: 5_000,
};

// The error for an event that tallyd would reject. So the click must not be counted.
export class Refused extends RangeError {
  constructor(reason, value) {
    super(`${reason}: ${JSON.stringify(value)}`);
    this.reason = reason;
  }
}

// Closes a connection without waiting for the broker, which no longer answers. amqplib treats this as a lost
// connection.
const destroy = ({ connection }, error) => connection.connection.stream.destroy(error);

// ------------------------------------------------------------------ the contract: names and formats

// Returns the keys of the target's bucket and of the two hashes with its recent clicks. In a Redis Cluster, all
// three keys are in one slot.
export function keysOf({ keyPrefix, bucketBits }, kind, targetId) {
  const bucket = (1 << bucketBits) | (crc32(targetId) & ((1 << bucketBits) - 1));
  const tag = `{${kind}:${bucket.toString(16)}}`;
  return [`${keyPrefix}c:${tag}`, `${keyPrefix}recent:${tag}`, `${keyPrefix}recent:${tag}:former`];
}

// Returns further keys that like.lua needs if there are Bloom filters. Without these keys, the like would be missing in
// the filter.
export function filterKeys(settings, kind, targetId) {
  const [bucket] = keysOf(settings, kind, targetId);
  const name = `${settings.keyPrefix}filter:${bucket.slice(bucket.indexOf('{'))}:${targetId}`;
  return [bucket, name, `${name}:config`, `${name}:added`];
}

// Returns whether Redis has lost the bucket. `loaded` is the value of the bucket's field `_`.
export const isMissing = (loaded) => loaded === null;

// Returns the bucket's name in the set `tally:c:missing`, for instance video:3a2f.
export const missingName = (bucket) => bucket.slice(bucket.indexOf('{') + 1, -1);

// Returns the number in `value`. HMGET returned `loaded` for the field `_`, and `value` for the id. `null` means that
// the number is unknown, not that the number is zero.
export function numberIn(loaded, value, place) {
  if (loaded === null || loaded.startsWith('~')) return null;
  const numbers = value ? value.split(',') : [];
  if (numbers.length < place) return 0;
  return /^-?[0-9]+$/.test(numbers[place - 1]) ? Number(numbers[place - 1]) : null;
}

// Checks that an id has only digits, no sign and no leading zero, so that each id has only one spelling.
export function anId(text, reason = 'target-id-out-of-range') {
  if (typeof text !== 'string' || !/^[1-9][0-9]{0,18}$/.test(text) || BigInt(text) > ID_MAX) throw new Refused(reason, text);
  return text;
}

// Checks a time in microseconds. A JavaScript number can hold such a time exactly until the year 2255.
export function aTime(at) {
  if (!/^[0-9]{1,18}$/.test(at) || BigInt(at) < 1n || BigInt(at) > AT_MAX) throw new Refused('at-out-of-range', at);
  if (BigInt(at) < AT_MIN) throw new Refused('at-too-early', at);
  return Number(at);
}

// Returns the event to publish. `at` is the text that the script returned.
export function eventOf({ kinds }, type, kind, targetId, userId, at, count = null) {
  if (type !== 'like' && type !== 'unlike') throw new Refused('unknown-type', type);
  if (!Object.hasOwn(kinds, kind)) throw new Refused('unknown-kind', kind);
  const event = { type, kind, target_id: anId(targetId), user_id: anId(userId, 'user-id-out-of-range'), at: aTime(at) };
  return count === null ? event : { ...event, count };
}

// Returns an event that changes a number other than likes. To retry, publish the same event: tallyd recognizes it by
// `event_id` and `at`.
export function countEventOf({ kinds, metrics }, kind, targetId, metric, delta, eventId, at) {
  if (!Object.hasOwn(kinds, kind)) throw new Refused('unknown-kind', kind);
  anId(targetId);
  // This also refuses the metric `like`, because only likes change this metric.
  if (!metrics.includes(metric)) throw new Refused('unknown-metric', metric);
  if (!Number.isInteger(delta) || Math.abs(delta) > 2 ** 31) throw new Refused('delta-out-of-range', delta);
  const characters = typeof eventId === 'string' ? [...eventId].length : 0;
  if (characters < 1 || characters > 64) throw new Refused('event-id-out-of-range', eventId);
  return { type: 'count', kind, target_id: targetId, metric, delta, event_id: eventId, at: aTime(at) };
}

// ------------------------------------------------------------------ the client

export class Client {
  #settings;
  #redis;
  #connecting = null;
  #rows;
  #publisher = null;

  constructor(settings = {}) {
    this.#settings = { ...defaults, ...settings };
    const { mysqlUrl, timeoutMs, mysqlRestMs } = this.#settings;
    this.#redis = this.#newRedis();
    this.#rows = new Rows(mysqlUrl, timeoutMs, mysqlRestMs);
  }

  async connect() {
    await this.#within(this.#redis.connect());
  }

  async close() {
    const publisher = await this.#publisher?.catch(() => null);
    if (publisher) await this.#within(publisher.connection.close()).catch((error) => destroy(publisher, error));
    if (this.#redis.isOpen) this.#redis.destroy();
    await this.#rows.end();
  }

  // Counts and publishes a like ('like') or an unlike ('unlike'). Returns { waitMs } if the user clicks too often.
  // Otherwise returns the event, and whether it changed anything.
  async click(type, kind, targetId, userId) {
    // An event that can't be published must not be counted.
    eventOf(this.#settings, type, kind, targetId, userId, String(AT_MIN));
    const waitMs = await this.#waitMs(userId);
    if (waitMs > 0) return { waitMs };
    const { changed, at, count } = await this.count(type, kind, targetId, userId);
    const event = eventOf(this.#settings, type, kind, targetId, userId, at, count);
    const delta = type === 'like' ? 1 : -1;
    if (changed) await this.#countOnBoard(event, delta);
    try {
      // Publish even if nothing changed: perhaps the user's last click was never published, and a repeated event is
      // harmless.
      await this.publish(event);
    } catch (error) {
      // An error here must not hide the reason why publishing failed.
      if (await this.takeBack(event).catch(() => false)) await this.#countOnBoard(event, -delta);
      throw error;
    }
    return { event, changed };
  }

  // Publishes a change of a number other than likes. If the confirm is lost, retry with the same id and time, or
  // publish the property `event` of the thrown error.
  async add(kind, targetId, metric, delta, eventId = randomUUID(), at = String(Date.now() * 1_000)) {
    const event = countEventOf(this.#settings, kind, targetId, metric, delta, eventId, at);
    await this.publish(event);
    return event;
  }

  // Counts a click in Redis if it changes what the user likes. Returns whether the click changed something,
  // and `at`, which the event must carry. Also returns the target's number of likes, or `null` if it is unknown.
  async count(type, kind, targetId, userId) {
    const { like, rememberedS, filters } = this.#settings;
    const keys = [...keysOf(this.#settings, kind, targetId), ...(filters ? filterKeys(this.#settings, kind, targetId) : [])];
    const ask = (row) => this.#callLike(keys, [targetId, like, type, userId, rememberedS, row]);
    let [result, at, count] = await ask('');
    if (result < 0) [result, at, count] = await ask(await this.#row(type, kind, targetId, userId));
    return { changed: result === 1, at, count: count ?? null };
  }

  // Takes back a click that could not be published. Returns true if the click no longer counts and no other request
  // publishes it.
  async takeBack(event) {
    const { kind, target_id: targetId, user_id: userId, type, at } = event;
    const keys = keysOf(this.#settings, kind, targetId);
    return (await this.#call(TAKE_BACK, keys, [targetId, this.#settings.like, type, userId, at])) === 1;
  }

  // Publishes an event, and returns when the broker has stored it on disk in a queue. If publishing fails, the error
  // contains the event, so the caller can publish it again.
  async publish(event) {
    for (let tries = TRIES; ; tries -= 1) {
      try {
        return await this.#publishOnce(event);
      } catch (error) {
        // Perhaps RabbitMQ has the event. The same event counts only once, but a new event would count again.
        if (tries === 1) throw Object.assign(new Error(error.message, { cause: error }), { event });
        await sleep(PAUSE_MS);
      }
    }
  }

  // Reads the targets' numbers of likes, in one round trip. A number is `null` if Redis does not know it: then
  // ask MySQL.
  async read(kind, targetIds) {
    const { keyPrefix, like } = this.#settings;
    const buckets = targetIds.map((id) => keysOf(this.#settings, kind, id)[0]);
    // The library sends commands together if the caller does not wait between them.
    const answers = await this.#within(
      Promise.all(targetIds.map((id, place) => this.#redis.hmGet(buckets[place], ['_', id]))),
    );
    const missing = buckets.filter((_, place) => isMissing(answers[place][0]));
    if (missing.length > 0) {
      // tallyd loads the buckets in this set immediately. If SADD fails, for instance on a replica, the read continues.
      const names = missing.map(missingName);
      await this.#within(this.#redis.sAdd(`${keyPrefix}c:missing`, names)).catch(() => {});
    }
    return answers.map(([loaded, value]) => numberIn(loaded, value, like));
  }

  // Reads the numbers as `read` does, and asks MySQL for numbers that Redis does not know. MySQL does not
  // include events in flight yet.
  async readOrAsk(kind, targetIds) {
    const numbers = await this.read(kind, targetIds);
    const unknown = targetIds.filter((_, place) => numbers[place] === null);
    const rows = await this.#ask(
      'SELECT target_id, SUM(value) AS likes FROM counter WHERE kind = ? AND target_id IN (?) AND metric = ? GROUP BY target_id',
      [this.#settings.kinds[kind], unknown, this.#settings.like],
    );
    const inMysql = new Map(rows.map((row) => [String(row.target_id), Number(row.likes)]));
    return numbers.map((number, place) => number ?? inMysql.get(targetIds[place]) ?? 0);
  }

  // Returns whether the user likes each target. Redis knows the clicks of the last minutes, and MySQL knows older
  // clicks.
  async liked(kind, userId, targetIds) {
    const click = (id, key) => this.#redis.hGet(key, `${id}:${userId}`);
    const clicks = await this.#within(
      Promise.all(targetIds.map((id) => Promise.all(keysOf(this.#settings, kind, id).slice(1).map((key) => click(id, key))))),
    );
    // The newer click comes first.
    const lately = clicks.map(([newer, older]) => newer ?? older);
    const inMysql = await this.#clicksInMysql(kind, userId, targetIds.filter((_, place) => lately[place] === null));
    return targetIds.map((id, place) => (lately[place] ?? inMysql.get(id) ?? '-').endsWith('+'));
  }

  // Returns how many milliseconds the user must wait, or 0 if the click is allowed.
  async #waitMs(userId) {
    const { keyPrefix, clicksMax, windowMs } = this.#settings;
    if (clicksMax === 0) return 0;
    const [isAllowed, left] = await this.#call(LIMIT, [`${keyPrefix}limit:{${userId}}`], [clicksMax, windowMs, randomUUID()]);
    return isAllowed === 1 ? 0 : left;
  }

  // Adds the click to the board. The click counts even if this fails. The event's time decides the periods, so the same
  // periods change if the click is taken back.
  async #countOnBoard(event, delta) {
    const { board, boardPeriods, keyPrefix } = this.#settings;
    if (!board) return;
    const keys = boardKeys(board, boardPeriods, event.at / 1_000, keyPrefix);
    await this.#call(BOARD, keys, [event.target_id, delta]).catch(() => {});
  }

  // Runs like.lua, and retries once if its answer was lost. The script remembers the click, so no click counts twice.
  async #callLike(keys, values) {
    const redis = this.#redis;
    try {
      return await this.#call(LIKE, keys, values);
    } catch (error) {
      if (error instanceof ErrorReply || error instanceof ClientOfflineError) throw error;
      await this.#connectAnew(redis);
      return await this.#call(LIKE, keys, values);
    }
  }

  // Runs a script. If this throws an error, the script may have run.
  async #call({ text, sha1 }, keys, values) {
    const options = { keys, arguments: values.map(String) };
    try {
      return await this.#within(this.#redis.evalSha(sha1, options));
    } catch (error) {
      if (!error.message.startsWith('NOSCRIPT')) throw error;
      // The server is new, or SCRIPT FLUSH ran: the script did not run. EVAL runs and loads it.
      return await this.#within(this.#redis.eval(text, options));
    }
  }

  #newRedis() {
    const { redisUrl: url, timeoutMs: connectTimeout } = this.#settings;
    // A call without a connection fails immediately, and the library does not send this call later. If the connection
    // breaks, a call in flight fails. The library never resends this call, because the call may have counted.
    const redis = createClient({ url, disableOfflineQueue: true, socket: { connectTimeout } });
    return redis.on('error', (error) => console.error(`Redis: ${error.message}`));
  }

  // Replaces the connection after a timeout or an error. After a timeout, all further calls on the old connection would
  // be late, too. The first caller reconnects for all callers.
  async #connectAnew(redis) {
    if (this.#redis === redis) {
      if (redis.isOpen) redis.destroy();
      this.#redis = this.#newRedis();
      this.#connecting = this.#redis.connect();
    }
    await this.#within(this.#connecting);
  }

  // ---------------------------------------------------------------- RabbitMQ

  async #publishOnce(event) {
    const publisher = await this.#connected();
    const { exchange } = this.#settings;
    const messageId = randomUUID();
    const options = { contentType: 'application/json', persistent: true, mandatory: true, messageId };
    try {
      await this.#within(
        new Promise((resolve, reject) => {
          const confirmed = (error) => (error ? reject(publisher.reason ?? error) : resolve());
          const key = event.user_id ?? event.target_id;
          publisher.channel.publish(exchange, key, Buffer.from(JSON.stringify(event)), options, confirmed);
        }),
      );
    } catch (error) {
      // Close a late connection. A failed connection closes automatically. A nack concerns only this event.
      if (error instanceof Late) destroy(publisher, error);
      throw error;
    }
    // If no queue takes the message, the broker first returns the message and then confirms it.
    if (publisher.returned.delete(messageId)) throw new Error('no queue takes the event: has tallyd ever run?');
  }

  // Returns the connection for publishing, which all calls share.
  #connected() {
    this.#publisher ??= this.#connectPublisher().catch((error) => {
      this.#publisher = null;
      throw error;
    });
    return this.#publisher;
  }

  async #connectPublisher() {
    const { amqpUrl, timeoutMs } = this.#settings;
    const connection = await amqp.connect(amqpUrl, { timeout: timeoutMs });
    const publisher = { connection, channel: null, returned: new Set(), reason: null };
    // An error of the connection or the channel ends both. The next call connects again.
    const failed = (error) => (publisher.reason = error);
    connection.on('error', failed).on('close', () => this.#drop(publisher));
    publisher.channel = await this.#within(connection.createConfirmChannel()).catch((error) => {
      destroy(publisher, error);
      throw error;
    });
    publisher.channel.on('error', failed).on('close', () => this.#drop(publisher));
    publisher.channel.on('return', (message) => publisher.returned.add(message.properties.messageId));
    return publisher;
  }

  #drop(publisher) {
    if (publisher.dropped) return;
    publisher.dropped = true;
    this.#publisher = null;
    this.#within(publisher.connection.close()).catch((error) => destroy(publisher, error));
  }

  // ---------------------------------------------------------------- MySQL

  // Returns the user's row in MySQL. The row is needed only if Redis has no recent click of the user.
  async #row(type, kind, targetId, userId) {
    try {
      return (await this.#clicksInMysql(kind, userId, [targetId])).get(targetId) ?? '0-';
    } catch {
      // MySQL is unreachable. Count the click: it may count twice until a full reconcile, but no click is lost.
      return type === 'like' ? '0-' : '0+';
    }
  }

  // Returns the user's last click on each target: `at`, with "+" for a like or "-" for an unlike.
  async #clicksInMysql(kind, userId, targetIds) {
    const rows = await this.#ask(
      "SELECT target_id, CONCAT(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', update_at), IF(is_del, '-', '+')) AS click " +
        'FROM like_record WHERE kind = ? AND target_id IN (?) AND user_id = ?',
      [this.#settings.kinds[kind], targetIds, BigInt(userId)],
    );
    return new Map(rows.map((row) => [String(row.target_id), row.click]));
  }

  // Runs a query whose second parameter is a list of ids. MySQL can compare strings as inexact numbers (DOUBLE), so
  // the ids are BigInts.
  async #ask(sql, [kind, targetIds, last]) {
    if (targetIds.length === 0) return [];
    return this.#rows.query(sql, [kind, targetIds.map(BigInt), last]);
  }

  #within(promise) {
    return within(promise, this.#settings.timeoutMs);
  }
}
