// Reads from Redis.

import { createClient } from 'redis';
import { bucketOf, keyOf, numbersIn } from './counters.js';
import { ReadError } from './errors.js';
import { within } from './waiting.js';

export class Reader {
  #url;
  #layout;
  #timeoutMs;
  #redis = null;

  constructor(url, layout, timeoutMs) {
    this.#url = url;
    this.#layout = layout;
    this.#timeoutMs = timeoutMs;
  }

  async counters(kind, targetIds, metric) {
    try {
      const redis = await this.#connected();
      // node-redis sends commands together if the caller does not wait between them.
      const asked = targetIds.map((id) => redis.hmGet(keyOf(this.#layout, bucketOf(this.#layout, kind, id)), ['_', id]));
      const answers = await this.#within(Promise.all(asked));
      const { numbers, missing } = numbersIn(this.#layout, kind, metric, targetIds, answers);
      // The daemon then loads the noted buckets. Reading must not fail if this write fails, for instance on a replica.
      if (missing.length > 0) await this.#within(redis.sAdd(`${this.#layout.keyPrefix}c:missing`, missing)).catch(() => {});
      return new Map(targetIds.map((id, place) => [id, numbers[place]]));
    } catch (error) {
      this.#failed(error);
      const isLogin = /^(WRONGPASS|NOAUTH)/.test(error.message);
      const [fault, check] = isLogin ? ['refused the login', 'user and password in `redisUrl`'] : ['did not answer', 'that it runs'];
      const message = `Redis ${fault} (${error.message}): treat the numbers as unknown, and check ${check}`;
      throw new ReadError(message, { cause: error });
    }
  }

  // Reads the daemons' announcement of the numbers that API servers count. Returns `null` if there is no announcement.
  async writers() {
    try {
      const redis = await this.#connected();
      return await this.#within(redis.get(`${this.#layout.keyPrefix}c:writers`));
    } catch (error) {
      this.#failed(error);
      throw error;
    }
  }

  async #connected() {
    if (!this.#redis) {
      // A call without a connection fails immediately, and node-redis does not send it later.
      const socket = { connectTimeout: this.#timeoutMs };
      this.#redis = createClient({ url: this.#url, disableOfflineQueue: true, socket });
      // Ignore these errors, because each call reports its own error.
      this.#redis.on('error', () => {});
      this.#redis.connect().catch(() => {});
    }
    const redis = this.#redis;
    if (!redis.isReady) {
      const ready = new Promise((resolve, reject) => redis.once('ready', resolve).once('error', reject));
      await this.#within(ready);
    }
    return redis;
  }

  // Drops a connection that no longer answers. The next call connects again.
  #failed(error) {
    if (!this.#redis?.isReady || error.isLate) this.close();
  }

  #within(promise) {
    return within(promise, this.#timeoutMs).catch((error) => {
      throw Object.assign(error, { isLate: true });
    });
  }

  close() {
    const redis = this.#redis;
    this.#redis = null;
    if (redis?.isOpen) redis.destroy();
  }
}
