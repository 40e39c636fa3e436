// Reads the site card and numbers from Redis, or from a Redis Cluster.

import { createClient, createCluster, ErrorReply } from 'redis';
import { DEFAULT, parsed } from './card.js';
import { bucketOf, numberIn, read } from './counters.js';
import { ReadError } from './errors.js';
import { parsed as parsedUrl } from './url.js';
import { Late, within } from './waiting.js';

const CARD_EVERY_MS = 60_000;
// The pause after a read without a card.
const CARD_AGAIN_MS = 1_000;
// How long a call waits for the card, and the first call, which has no card yet.
const CARD_READ_MAX_MS = 500;
const CARD_FIRST_MAX_MS = 2_000;
const MISSING_KEPT_S = 3_600;

export class Reader {
  #url;
  #keyPrefix;
  #timeoutMs;
  #isCluster = false;
  #link = null;
  #card = DEFAULT;
  #cardError = null;
  #hasWarned = false;
  #reading = null;
  #dueAt = 0;

  constructor(url, keyPrefix, timeoutMs) {
    const { protocol } = parsedUrl('redisUrl', url);
    if (!['redis:', 'rediss:'].includes(protocol)) throw new TypeError(`redisUrl begins with ${protocol}, allowed are redis:// and rediss://`);
    this.#url = url;
    this.#keyPrefix = keyPrefix;
    this.#timeoutMs = timeoutMs;
  }

  // ---------------------------------------------------------------- the card

  // Resolves with the site's card, at most a minute old while Redis answers. If Redis has no card that can be read,
  // resolves with the last one.
  async card() {
    if (performance.now() >= this.#dueAt) return this.freshCard();
    if (!this.#card.kinds) await this.#reading;
    return this.#card;
  }

  // Reads the card now.
  async freshCard() {
    this.#dueAt = performance.now() + CARD_EVERY_MS;
    this.#reading = within(this.#readCard(), this.#reading ? CARD_READ_MAX_MS : CARD_FIRST_MAX_MS).catch(() => {});
    await this.#reading;
    return this.#card;
  }

  async #readCard() {
    const key = `${this.#keyPrefix}c:site`;
    let card = null;
    // Silence counts as an error.
    this.#cardError = new Late('no answer in time');
    try {
      card = parsed(await this.#asked((redis) => redis.get(key)));
      this.#cardError = null;
    } catch (error) {
      this.#cardError = error;
    }
    if (card) {
      this.#card = card;
      this.#hasWarned = false;
      return;
    }
    this.#dueAt = performance.now() + CARD_AGAIN_MS;
    if (this.#hasWarned) return;
    this.#hasWarned = true;
    const why = this.#cardError?.message ?? `Redis has no card at ${key} that this version can read`;
    console.warn(`tallyd: the site card can't be read (${why}). The client uses the last card, or publishes without checking names.`);
  }

  // ---------------------------------------------------------------- numbers

  // Reads the numbers. `null` means that a number is unknown. Throws ReadError if Redis does not answer.
  async counters(card, kind, targetIds, metric) {
    // Without a card the layout is unknown.
    if (!card.metrics && this.#cardError) throw readError(this.#cardError);
    if (!card.metrics) return new Map();
    // node-redis sends commands together if the caller does not wait between them.
    const reads = (redis) => Promise.all(targetIds.map((id) => read(redis, card, this.#keyPrefix, kind, metric, id)));
    const answers = await this.#asked(reads).catch((error) => {
      throw readError(error);
    });
    const missing = targetIds.filter((_, place) => answers[place][0] === null).map((id) => bucketOf(card, kind, id));
    if (missing.length > 0) await this.#note([...new Set(missing)].sort());
    return new Map(targetIds.map((id, place) => [id, numberIn(card, kind, metric, answers[place])]));
  }

  // Notes the buckets that Redis has lost. A daemon then loads them. Reading must not fail if this write fails, for
  // instance on a replica.
  async #note(buckets) {
    const key = `${this.#keyPrefix}c:missing`;
    await this.#asked((redis) => Promise.all([redis.sAdd(key, buckets), redis.expire(key, MISSING_KEPT_S)])).catch(() => {});
  }

  // ---------------------------------------------------------------- connections

  async #asked(ask) {
    // Concurrent calls wait for one connection.
    this.#link ??= this.#open();
    const link = this.#link;
    try {
      return await within(link.ready.then(() => ask(link.redis)), this.#timeoutMs);
    } catch (error) {
      if (error instanceof ErrorReply && error.message.startsWith('MOVED ')) this.#isCluster = true;
      const needsCluster = this.#isCluster && !link.isCluster;
      // Drop a connection that failed. The next call connects again. After an error reply it still works.
      if (needsCluster || !(error instanceof ErrorReply) || !link.redis.isOpen) this.#drop(link);
      if (needsCluster) return this.#asked(ask);
      throw error;
    }
  }

  #open() {
    const socket = { connectTimeout: this.#timeoutMs };
    const redis = this.#isCluster ? this.#cluster(socket) : createClient({ url: this.#url, disableOfflineQueue: true, socket: { ...socket, reconnectStrategy: false } });
    // Ignore these errors, because each call reports its own error.
    redis.on('error', () => {});
    return { redis, isCluster: this.#isCluster, ready: redis.connect() };
  }

  #cluster(socket) {
    const { username, password, protocol } = new URL(this.#url);
    const [user, secret] = [username, password].map((text) => decodeURIComponent(text) || undefined);
    const defaults = { username: user, password: secret, disableOfflineQueue: true, socket: { ...socket, tls: protocol === 'rediss:' || undefined } };
    return createCluster({ rootNodes: [{ url: this.#url }], defaults });
  }

  #drop(link) {
    if (this.#link === link) this.#link = null;
    if (link.redis.isOpen) link.redis.destroy();
  }

  // Closes the connections. Reads in flight fail.
  close() {
    // Such a read is no outage.
    this.#hasWarned = true;
    if (this.#link) this.#drop(this.#link);
  }
}

function readError(error) {
  const isLogin = /^(WRONGPASS|NOAUTH)/.test(error.message);
  const [fault, check] = isLogin ? ['refused the login', 'user and password in `redisUrl`'] : ['did not answer', 'that it runs'];
  return new ReadError(`Redis ${fault} (${error.message}): treat the numbers as unknown, and check ${check}`, { cause: error });
}
