// The numbers that API servers count, as daemons announce them in Redis. Clients follow, so that a site can change it.

import { within } from './waiting.js';

// How old an answer can be.
const EVERY_MS = 10_000;
// How long a publish waits for an answer.
const READ_MAX_MS = 500;

export class Writers {
  #read;
  #now;
  // An older daemon announces nothing, and counts everything.
  #byApi = new Set();
  #reading = null;
  #wasRead = false;
  #dueAt = 0;

  // `read` resolves with the text in Redis.
  constructor(read, now = () => performance.now()) {
    this.#read = read;
    this.#now = now;
  }

  // As of the last ten seconds. One call asks Redis; the others continue with what is known, except before the first answer.
  async byApi() {
    const isDue = this.#now() >= this.#dueAt;
    if (isDue) {
      this.#dueAt = this.#now() + EVERY_MS;
      this.#reading = this.#ask();
    }
    if (isDue || !this.#wasRead) await this.#reading;
    return this.#byApi;
  }

  async #ask() {
    try {
      this.#byApi = announced(await within(this.#read(), READ_MAX_MS)) ?? this.#byApi;
    } catch {
      // A Redis that does not answer changes nothing.
    }
    this.#wasRead = true;
  }
}

// What the text announces, for instance {"api": ["video:like"]}; null where it is something else.
export function announced(text) {
  const numbers = JSON.parse(text)?.api;
  return Array.isArray(numbers) ? new Set(numbers) : null;
}
