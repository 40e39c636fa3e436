// Reading through `tallyd gateway`.

import http from 'node:http';
import https from 'node:https';
import { GatewayError, ReadError } from './errors.js';

// Targets of one request.
const IDS_MAX = 500;

export class Gateway {
  #client;
  #options;
  #path;

  constructor(url, token, timeoutMs) {
    const { protocol, hostname, port, pathname } = new URL(url);
    const clients = { 'http:': http, 'https:': https, 'unix:': http };
    if (!clients[protocol]) throw new TypeError(`gateway is ${url}, allowed are http://, https:// and unix:///path`);
    this.#client = clients[protocol];
    const isSocket = protocol === 'unix:';
    const address = isSocket ? { socketPath: decodeURIComponent(pathname) } : { hostname: hostname.replace(/^\[|\]$/g, ''), port };
    const headers = { accept: 'application/json', ...(token === undefined ? {} : { authorization: `Bearer ${token}` }) };
    this.#options = { ...address, headers, agent: new this.#client.Agent({ keepAlive: true }), timeoutMs };
    this.#path = isSocket ? '' : pathname.replace(/\/$/, '');
  }

  async counters(kind, targetIds, metric) {
    const found = new Map();
    for (const ids of chunks(targetIds)) {
      const { counters } = await this.get('/v1/counters', { kind, ids: ids.join(','), metrics: metric });
      for (const counter of counters) found.set(counter.id, counter[metric]);
    }
    return found;
  }

  async likes(kind, targetIds, user) {
    const found = new Map();
    for (const ids of chunks(targetIds)) {
      const { likes } = await this.get('/v1/likes', { user, kind, ids: ids.join(',') });
      for (const { id, liked } of likes) found.set(id, liked);
    }
    return found;
  }

  async get(path, query) {
    const target = `${this.#path}${path}?${new URLSearchParams(query)}`;
    try {
      const { status, text } = await this.#ask(target).catch((error) => {
        // The gateway has closed the idle connection meanwhile. Reading twice is harmless.
        if (!error.reusedSocket) throw error;
        return this.#ask(target);
      });
      return parsed(status, text);
    } catch (error) {
      if (error instanceof GatewayError) throw error;
      const message = `the gateway did not answer (${error.message}): treat the number as unknown, and check that it runs`;
      throw new ReadError(message, { cause: error });
    }
  }

  #ask(path) {
    const { timeoutMs, ...options } = this.#options;
    return new Promise((resolve, reject) => {
      const signal = AbortSignal.timeout(timeoutMs);
      const request = this.#client.request({ ...options, path, signal }, (response) => {
        const parts = [];
        response.on('data', (part) => parts.push(part)).on('error', reject);
        response.on('end', () => resolve({ status: response.statusCode, text: Buffer.concat(parts).toString() }));
      });
      request.on('error', (error) => {
        const isLate = signal.aborted;
        reject(Object.assign(isLate ? new Error(`no answer in ${timeoutMs} ms`) : error, { reusedSocket: request.reusedSocket && !isLate }));
      });
      request.end();
    });
  }

  close() {
    this.#options.agent.destroy();
  }
}

function* chunks(ids) {
  for (let first = 0; first < ids.length; first += IDS_MAX) yield ids.slice(first, first + IDS_MAX);
}

function parsed(status, text) {
  let answer;
  try {
    answer = JSON.parse(text);
  } catch {
    answer = null;
  }
  if (status === 200 && answer !== null && typeof answer === 'object') return answer;
  const { code = null, message = 'no explanation' } = answer?.error ?? {};
  throw new GatewayError(`the gateway answered ${status} (${code}): ${message}`, status, code);
}
