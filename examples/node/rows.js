// Queries MySQL, with a timeout for every wait.

import mysql from 'mysql2/promise';

export class Late extends Error {}

// Waits for the promise, at most `timeoutMs`. After this time, the call fails with `Late`.
export function within(promise, timeoutMs) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Late(`no answer within ${timeoutMs} ms`)), timeoutMs);
  });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}

export class Rows {
  #pool;
  #timeoutMs;
  #restMs;
  #restsUntil = 0;

  // After a failure, the pool sends MySQL no query during the next `restMs`, so that not every request
  // has to wait for MySQL.
  constructor(uri, timeoutMs, restMs) {
    const big = { supportBigNumbers: true, bigNumberStrings: true };
    // The pool connects at the first query.
    this.#pool = mysql.createPool({ uri, connectionLimit: 10, connectTimeout: timeoutMs, ...big });
    this.#timeoutMs = timeoutMs;
    this.#restMs = restMs;
  }

  async query(sql, values) {
    if (Date.now() < this.#restsUntil) throw new Error('MySQL failed a moment ago and is skipped');
    const waiting = this.#pool.getConnection();
    let connection;
    try {
      connection = await within(waiting, this.#timeoutMs);
      const [rows] = await within(connection.query(sql, values), this.#timeoutMs);
      connection.release();
      return rows;
    } catch (error) {
      this.#restsUntil = Date.now() + this.#restMs;
      // Don't return the connection to the pool, because its answer may still arrive.
      if (connection) connection.destroy();
      else waiting.then((late) => late.release(), () => {});
      throw error;
    }
  }

  end() {
    return this.#pool.end();
  }
}
