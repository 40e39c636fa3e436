import assert from 'node:assert/strict';
import net from 'node:net';
import { test } from 'node:test';
import { inspect } from 'node:util';
import { DEFAULT, parsed } from '../src/card.js';
import { NackedError, Tallyd, UnconfirmedError } from '../src/index.js';
import { Publisher } from '../src/publisher.js';
import { Reader } from '../src/reader.js';
import { ToRabbitmq } from '../src/sender.js';

const SITE = {
  version: 1,
  number: 17,
  layout: { form: 'packed', bucket_bits: 13 },
  kinds: { video: 1, post: 2 },
  metrics: { like: 1, view: 2, unread: 3 },
  api: ['post:like', 'post:view'],
  exchange: 'site.events',
  partition_by: 'target',
  at_min_s: 1262304000,
  settable: ['video:unread'],
  below_zero: ['video:unread'],
  later: 'a field of a later version',
};
const PLAIN = { form: 'entity', bucket_bits: 4, counter_key: '{kind}/{id}' };

// A fake Redis server.
class Redis {
  site = SITE;
  numbers = {};
  commands = [];
  isSilent = false;
  #sockets = new Set();

  answer(name, key, ...args) {
    if (name === 'GET') return this.site && JSON.stringify(this.site);
    if (name === 'HMGET') return args.map((field) => this.numbers[`${key} ${field}`] ?? null);
    if (name !== 'EVAL') return name === 'CLIENT' ? new Error('ERR') : 1;
    const [, bucket, number, field] = args;
    return [this.numbers[`${bucket} _`] ?? null, this.numbers[`${number} ${field}`] ?? null];
  }

  async start() {
    this.server = net.createServer((socket) => {
      let lines = [];
      this.#sockets.add(socket.on('error', () => {}));
      socket.on('data', (data) => {
        // No command of these tests is split, or has a line break of this kind in an argument.
        lines = data.toString().split('\r\n');
        while (lines.length > 1) {
          const command = lines.splice(0, 2 * Number(lines[0].slice(1)) + 1).filter((_, place) => place > 0 && place % 2 === 0);
          if (command[0] !== 'CLIENT') this.commands.push(command);
          if (!this.isSilent) socket.write(encoded(this.answer(...command)));
        }
      });
    });
    await new Promise((resolve) => this.server.listen(0, '127.0.0.1', resolve));
    this.port = this.server.address().port;
    this.url = `redis://127.0.0.1:${this.port}`;
    return this;
  }

  stop() {
    this.server.close();
    for (const socket of this.#sockets) socket.destroy();
  }

  get connections() {
    return this.#sockets.size;
  }

  names() {
    return this.commands.map(([name]) => name);
  }
}

function encoded(answer) {
  if (Array.isArray(answer)) return `*${answer.length}\r\n${answer.map(encoded).join('')}`;
  if (answer === null) return '$-1\r\n';
  if (typeof answer === 'number') return `:${answer}\r\n`;
  return answer instanceof Error ? `-${answer.message}\r\n` : `$${Buffer.byteLength(answer)}\r\n${answer}\r\n`;
}

// Runs a test with a client of a fake Redis and a fake RabbitMQ.
function withSite(name, run) {
  test(name, async (t) => {
    const redis = await new Redis().start();
    const sent = [];
    t.mock.method(Publisher.prototype, 'publish', async (_, { exchange, routingKey }) => sent.push([exchange, routingKey]));
    let now = 0;
    t.mock.method(performance, 'now', () => now);
    const warn = t.mock.method(console, 'warn', () => {});
    const site = new Tallyd({ amqpUrl: 'amqp://127.0.0.1:1', redisUrl: redis.url });
    try {
      await run({ redis, site, sent, warn, minute: () => (now += 60_000) });
    } finally {
      await site.close();
      redis.stop();
    }
  });
}

test('only a card of a known version is read', () => {
  assert.deepEqual(parsed(JSON.stringify(SITE)).settable, ['video:unread']);
  assert.equal(parsed(JSON.stringify({ ...SITE, layout: PLAIN })).counterKey, '{kind}/{id}');
  const bad = [{ ...SITE, version: 2 }, { ...SITE, layout: { form: 'new', bucket_bits: 1 } }, [], 7, { version: 1 }];
  for (const text of [null, '', 'no JSON', ...bad.map((card) => JSON.stringify(card))]) assert.equal(parsed(text), null, text);
});

withSite('events go where the card says', async ({ redis, site, sent }) => {
  await site.like('video', 42, 7);
  await site.count('video', 43, 'view');
  assert.deepEqual(sent, [['site.events', '42'], ['site.events', '43']]);
  assert.deepEqual(redis.commands, [['GET', 'tally:c:site']]);
});

withSite('the card is read again each minute', async ({ redis, site, sent, minute }) => {
  await site.like('video', 42, 7);
  redis.site = { ...SITE, exchange: 'other.events' };
  minute();
  await Promise.all(Array.from({ length: 9 }, () => site.like('video', 42, 7)));
  redis.site = { ...SITE, version: 2 };
  minute();
  await site.like('video', 42, 7);
  assert.deepEqual([sent.at(-1)[0], redis.names()], ['other.events', ['GET', 'GET', 'GET']]);
});

withSite('an unknown name is refused after one more look', async ({ redis, site, sent }) => {
  await assert.rejects(site.like('song', 1, 1), { name: 'RefusedError', reason: 'unknown-kind' });
  await assert.rejects(site.counts('video', [1], 'share'), { reason: 'unknown-metric' });
  await assert.rejects(site.set('video', 1, 'view', 5), { reason: 'not-settable' });
  assert.equal(redis.names().length, 4);
  redis.site = { ...SITE, kinds: { video: 1, song: 3 } };
  await site.like('song', 1, 1);
  await assert.rejects(site.like('song', 0, 1), { reason: 'target-id-out-of-range' });
  assert.deepEqual([sent.length, redis.names().length], [1, 5]);
});

withSite('what scripts count is only published with their at', async ({ site, sent }) => {
  const like = { type: 'like', kind: 'post', target_id: 1, user_id: 1 };
  const calls = [() => site.like('post', 1, 1), () => site.unlike('post', 1, 1, { at: 1795251385000005 }), () => site.count('post', 1, 'view'), () => site.publishMany([like])];
  for (const call of calls) await assert.rejects(call, { reason: 'counted-by-api', message: /docs\/scripts\.md/ });
  await site.publish({ ...like, at: 1795251385000005 });
  await site.publishMany([{ ...like, at: 1795251385000005 }]);
  assert.equal(sent.length, 2);
});

withSite('without a card names are unchecked and numbers unknown', async ({ redis, site, sent }) => {
  redis.site = null;
  assert.deepEqual(await site.counts('song', [1], 'share'), new Map([[1, null]]));
  await site.like('song', 1, 7);
  assert.deepEqual([sent, redis.names()], [[['tally.events', '7']], ['GET']]);
});

withSite('each outage of the card is one warning', async ({ redis, site, warn, minute }) => {
  for (const card of [null, null, SITE, { ...SITE, version: 2 }, null]) {
    redis.site = card;
    minute();
    await site.like('video', 42, 7);
  }
  const warnings = warn.mock.calls.map(({ arguments: [warning] }) => warning);
  assert.equal(warnings.length, 2);
  assert.match(warnings[0], /no card at tally:c:site/);
});

test('without Redis events are published', async (t) => {
  const silent = await new Redis().start();
  silent.isSilent = true;
  const publish = t.mock.method(Publisher.prototype, 'publish', async () => {});
  t.mock.method(console, 'warn', () => {});
  for (const redisUrl of ['redis://127.0.0.1:1', silent.url]) {
    const site = new Tallyd({ amqpUrl: 'amqp://127.0.0.1:1', redisUrl, deadlineMs: 1_000 });
    const began = performance.now();
    await site.like('song', 1, 7);
    assert.ok(performance.now() - began < 3_000);
    await assert.rejects(site.counts('video', [1]), { name: 'ReadError', message: /unknown/ });
    await site.close();
  }
  assert.deepEqual(publish.mock.calls.map(({ arguments: [, { exchange }] }) => exchange), ['tally.events', 'tally.events']);
  silent.stop();
});

withSite('numbers are read in each layout', async ({ redis, site, minute }) => {
  const loaded = { 'tally:c:{video:3088} _': '3:9', 'tally:c:{video:h18} _': '3:9', 'tally:c:{video:s18} _': '3:9' };
  redis.numbers = { ...loaded, 'tally:c:{video:3088} 42': '12,-3,-4', 'tally:video/42 like': '12', 'tally:counter:42:like ': '12' };
  const packed = await Promise.all(['like', 'view', 'unread'].map((metric) => site.counts('video', [42], metric)));
  assert.deepEqual(packed.map((found) => found.get(42)), [12, 0, -4]);
  for (const layout of [PLAIN, { form: 'string', bucket_bits: 4, counter_key: 'counter:{id}:{metric}' }]) {
    redis.site = { ...SITE, layout };
    minute();
    assert.deepEqual(await site.counts('video', [42, '45']), new Map([[42, 12], ['45', null]]));
    assert.deepEqual(await site.counts('video', [42], 'unread'), new Map([[42, 0]]));
  }
});

withSite('lost buckets are noted for an hour', async ({ redis, site }) => {
  // A daemon is already loading the bucket of 44.
  redis.numbers = { 'tally:c:{video:35bd} _': '~3:9' };
  assert.deepEqual(await site.counts('video', [42, 43, 44]), new Map([[42, null], [43, null], [44, null]]));
  const noted = [['SADD', 'tally:c:missing', 'video:201e', 'video:3088'], ['EXPIRE', 'tally:c:missing', '3600']];
  assert.deepEqual(redis.commands.slice(-2), noted);
});

withSite("a Cluster is read at each key's node", async ({ redis, site }) => {
  const other = await new Redis().start();
  other.numbers = { 'tally:c:{video:3088} _': '1:0', 'tally:c:{video:3088} 42': '5' };
  const here = redis.answer.bind(redis);
  redis.answer = (name, key, ...args) => {
    if (name === 'CLUSTER') return [[0, 1794, ['127.0.0.1', redis.port, 'a']], [1795, 1795, ['127.0.0.1', other.port, 'b']], [1796, 16383, ['127.0.0.1', redis.port, 'a']]];
    return key?.includes('3088') ? new Error(`MOVED 1795 127.0.0.1:${other.port}`) : here(name, key, ...args);
  };
  const found = await Promise.all([1, 2].map(() => site.counts('video', [42, 43])));
  for (const numbers of found) assert.deepEqual(numbers, new Map([[42, 5], [43, null]]));
  assert.deepEqual(other.names(), ['HMGET', 'HMGET']);
  other.stop();
});

withSite('an error reply leaves the connection open', async ({ redis, site }) => {
  const here = redis.answer.bind(redis);
  redis.answer = (name, ...args) => (name === 'HMGET' && args[2] === '43' ? new Error('WRONGTYPE') : here(name, ...args));
  await Promise.allSettled(Array.from({ length: 20 }, () => site.counts('video', [43])));
  await assert.rejects(site.counts('video', [43]), { name: 'ReadError', message: /WRONGTYPE/ });
  assert.deepEqual([redis.connections, await site.counts('video', [42])], [1, new Map([[42, null]])]);
  const reader = new Reader(redis.url, 'tally:', 1_000);
  const warned = [];
  process.on('warning', (warning) => warned.push(warning));
  await Promise.all(Array.from({ length: 20 }, () => reader.freshCard()));
  await new Promise((resolve) => setImmediate(resolve));
  assert.deepEqual([warned, redis.connections], [[], 2]);
  reader.close();
});

test('a wrong URL of Redis is refused at once', () => {
  for (const redisUrl of ['http://127.0.0.1', '127.0.0.1:6379', 'redis://127.0.0.1:port']) assert.throws(() => new Tallyd({ redisUrl }), TypeError);
});

test('the error about a wrong URL shows no password', async () => {
  const url = (scheme) => `${scheme}://user:hunter2@127.0.0.1:port`;
  const made = (settings) => () => new Tallyd(settings);
  const isSilent = (error) => error instanceof TypeError && !inspect(error, { showHidden: true, depth: 9 }).includes('hunter2');
  assert.throws(made({ redisUrl: url('redis') }), isSilent);
  assert.throws(made({ gateway: url('http') }), isSilent);
  await assert.rejects(new Tallyd({ amqpUrl: url('amqp') }).like('video', 42, 7), isSilent);
});

test('closing ends the calls in flight', async () => {
  const silent = net.createServer((socket) => socket.on('error', () => {})).listen(0, '127.0.0.1');
  await new Promise((resolve) => silent.once('listening', resolve));
  const site = new Tallyd({ amqpUrl: `amqp://127.0.0.1:${silent.address().port}`, deadlineMs: 4_000 });
  const like = site.like('video', 42, 7);
  await new Promise((resolve) => setTimeout(resolve, 50));
  const [, error] = await Promise.all([site.close(), like.catch((rejected) => rejected)]);
  assert.ok(error instanceof UnconfirmedError && error.event.user_id === '7', error);
  silent.close();
});

test('results keep the order of the list', async () => {
  const broker = {
    async publish(event) {
      if (event.target_id === '43') throw new NackedError('full', event);
    },
  };
  const like = { type: 'like', target_id: '42', user_id: '7' };
  const events = [{ ...like, target_id: '43' }, like, { ...like, user_id: '8' }];
  const [nacked, ...others] = await new ToRabbitmq(broker).publish(events, DEFAULT, 0);
  assert.ok(nacked instanceof NackedError && nacked.event.target_id === '43', nacked);
  assert.deepEqual(others, events.slice(1));
});
