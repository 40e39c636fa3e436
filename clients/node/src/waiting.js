// Waits with a timeout.

export class Late extends Error {}

// Waits for the promise, but at most for `timeoutMs`. After this time, fails with `Late`.
export function within(promise, timeoutMs, message) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Late(message ?? `no answer in ${timeoutMs} ms`)), timeoutMs);
  });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}

// A call with a deadline. While the call waits, it has one entry in a set of waiting calls. When the deadline has
// passed, the call removes its entry. Otherwise the set would grow during a long outage.
export class Call {
  isLate = false;
  #cancel = null;
  #timer;

  constructor(timeoutMs) {
    this.#timer = setTimeout(() => {
      this.isLate = true;
      this.#cancel?.();
    }, timeoutMs);
  }

  // Adds an entry to the set, passes the entry to `begin`, and waits until the entry is resolved.
  wait(waiting, begin = () => {}) {
    return new Promise((resolve, reject) => {
      const entry = { resolve, reject };
      const leave = (error) => {
        waiting.delete(entry);
        reject(error);
      };
      if (this.isLate) return reject(new Late('late'));
      waiting.add(entry);
      this.#cancel = () => leave(new Late('late'));
      try {
        begin(entry);
      } catch (error) {
        leave(error);
      }
    });
  }

  end() {
    clearTimeout(this.#timer);
    this.#cancel = null;
  }
}

// Removes all entries from the set and returns them.
export function taken(waiting) {
  const entries = [...waiting];
  waiting.clear();
  return entries;
}

// Limits the number of callers that run at the same time. Further callers wait.
export class Limit {
  #free;
  #waiting = new Set();

  constructor(max) {
    this.#free = max;
  }

  async enter(call) {
    if (this.#free > 0) this.#free -= 1;
    else await call.wait(this.#waiting);
  }

  leave() {
    const [next] = this.#waiting;
    this.#waiting.delete(next);
    if (next) next.resolve();
    else this.#free += 1;
  }
}
