import assert from 'node:assert/strict';
import http from 'node:http';
import net from 'node:net';
import { after, before, beforeEach, test } from 'node:test';
import { LimitedError, NackedError, RefusedError, RejectedError, Tallyd, UnconfirmedError } from '../src/index.js';
import { Gateway } from '../src/gateway.js';
import { Reader } from '../src/reader.js';
import { Sender } from '../src/sender.js';
import { announced, at, Writers } from '../src/writers.js';

const LIKE = { type: 'like', kind: 'video', target_id: '42', user_id: '7', at: 5 };
const COUNT = { type: 'count', kind: 'video', target_id: '42', metric: 'share', delta: 1, event_id: 'e', at: 6 };
const VIEW = { ...COUNT, metric: 'view' };

const verdicts = (verdict) => (events) => ({ events: events.map((event) => verdict(event)) });
const confirmed = (events) => [202, verdicts(({ at }) => ({ verdict: 'confirmed', at: 1_000 + at, changed: true, count: 1 }))(events)];
const unconfirmed = (events) => [503, verdicts(({ at }) => ({ verdict: 'unconfirmed', at, message: 'the broker is unreachable' }))(events)];
const busy = () => [503, { error: { code: 'busy', message: 'try again' } }];
const unauthorized = () => [401, { error: { code: 'unauthorized', message: 'send the token' } }];
// The connection ends without an answer.
const none = null;

const seen = { posted: [], traces: [], answers: [] };
let server;
let url;

async function serve(request, response) {
  const parts = [];
  for await (const part of request) parts.push(part);
  const events = JSON.parse(Buffer.concat(parts));
  seen.posted.push(events);
  seen.traces.push(request.headers.traceparent);
  const answer = seen.answers.length > 1 ? seen.answers.shift() : seen.answers[0];
  if (!answer) return response.destroy();
  const [status, body] = answer(events);
  response.writeHead(status).end(JSON.stringify(body));
}

before(async () => {
  server = http.createServer(serve);
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve));
  url = `http://127.0.0.1:${server.address().port}`;
});
after(() => server.close());
beforeEach(() => Object.assign(seen, { posted: [], traces: [], answers: [confirmed] }));

// A fake RabbitMQ.
class Broker {
  events = [];
  nacked = [];
  traces = [];

  async publish(event, routingKey, body, timeoutMs, traceparent) {
    this.traces.push(traceparent);
    assert.deepEqual(JSON.parse(body), event);
    if (this.nacked.includes(event.target_id)) throw new NackedError('full', event);
    this.events.push([routingKey, event]);
  }

  async close() {}
}

// A fake announcement in Redis.
const writers = { byApi: async () => new Set(['video:like', 'video:share']) };

async function send(events, { publisher, at = url, times = 1, deadlineMs = 5_000, traceparent }) {
  const gateway = at && new Gateway(at, undefined, 1_000);
  const sender = new Sender({ publisher, gateway, writers, partitionBy: 'user', deadlineMs });
  let results;
  for (let time = 0; time < times; time += 1) results = await sender.publish(events, traceparent);
  gateway?.close();
  return results;
}

async function warnings(run) {
  const heard = [];
  const hear = (warning) => heard.push(warning);
  process.on('warning', hear);
  await run();
  await new Promise((resolve) => setImmediate(resolve));
  process.off('warning', hear);
  return heard.filter(({ name }) => name === 'TallydWarning');
}

test('the gateway gets what API servers count', async () => {
  const publisher = new Broker();
  assert.deepEqual(await send([LIKE, VIEW, COUNT], { publisher }), [{ ...LIKE, at: 1_005 }, VIEW, { ...COUNT, at: 1_006 }]);
  assert.deepEqual(seen.posted, [[LIKE, COUNT]]);
  assert.deepEqual(publisher.events, [['42', VIEW]]);
});

test('both ways name the trace of the call', async () => {
  const traceparent = '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01';
  const publisher = new Broker();
  await send([LIKE, VIEW], { publisher, traceparent });
  await send([LIKE, VIEW], { publisher });
  assert.deepEqual([seen.traces, publisher.traces], [[traceparent, undefined], [traceparent, undefined]]);
});

test('the client asks for the trace at each publish', async () => {
  let calls = 0;
  const site = new Tallyd({ gateway: url, traceparent: () => `trace-${++calls}` });
  await site.like('video', 42, 7);
  await site.publishMany([LIKE, COUNT]);
  await site.close();
  assert.deepEqual(seen.traces, ['trace-1', 'trace-2']);
});

test('without a gateway each number is warned of once', async () => {
  const publisher = new Broker();
  const heard = await warnings(() => send([LIKE, LIKE, COUNT], { publisher, at: null, times: 2 }));
  assert.deepEqual(heard.map(({ code, message }) => [code, message.split(' ')[3]]), [['TALLYD_NOT_COUNTED', 'video:like'], ['TALLYD_NOT_COUNTED', 'video:share']]);
  assert.equal(publisher.events.length, 6);
});

test('retries have the same event', async () => {
  seen.answers = [busy, unconfirmed, confirmed];
  assert.deepEqual(await send([LIKE, COUNT], { publisher: new Broker() }), [{ ...LIKE, at: 1_005 }, { ...COUNT, at: 1_006 }]);
  assert.deepEqual(seen.posted, [[LIKE, COUNT], [LIKE, COUNT], [LIKE, COUNT]]);
});

test('without an answer RabbitMQ gets the same events', async () => {
  seen.answers = [none];
  const publisher = new Broker();
  const heard = await warnings(async () => {
    assert.deepEqual(await send([LIKE, COUNT], { publisher, times: 2, deadlineMs: 2_000 }), [LIKE, COUNT]);
  });
  assert.deepEqual(publisher.events, [['7', LIKE], ['42', COUNT], ['7', LIKE], ['42', COUNT]]);
  // The gateway could count the event twice.
  assert.equal(seen.posted.filter((events) => events.some(({ type }) => type === 'count')).length, 2);
  assert.ok(seen.posted.some((events) => events.length === 1 && events[0].type === 'like'));
  assert.deepEqual(heard.map(({ code }) => code), ['TALLYD_GATEWAY_FAILED']);
});

test('a gateway alone is asked until the deadline', async () => {
  seen.answers = [none, none, confirmed];
  assert.deepEqual(await send([COUNT], {}), [{ ...COUNT, at: 1_006 }]);
  seen.answers = [unconfirmed];
  const [late] = await send([LIKE], { deadlineMs: 300 });
  assert.ok(late instanceof UnconfirmedError && late.event === LIKE && late.message.includes('the broker is unreachable'), late);
  const [away] = await send([LIKE], { at: 'http://127.0.0.1:1', deadlineMs: 300 });
  assert.ok(away instanceof UnconfirmedError, away);
});

test('a wrong request is not tried again', async () => {
  seen.answers = [unauthorized];
  const publisher = new Broker();
  const [rejected] = await send([LIKE], { publisher });
  assert.ok(rejected instanceof RejectedError && rejected.event === LIKE && rejected.message.includes('401 (unauthorized)'), rejected);
  assert.deepEqual([seen.posted.length, publisher.events], [1, []]);
});

test('a list that is not whole says the fate of each event', async () => {
  const judged = [{ verdict: 'confirmed', at: 5 }, { verdict: 'refused', reason: 'unknown-kind', message: 'kind is song' }, { verdict: 'limited', wait_ms: 1_500 }];
  seen.answers = [() => [400, { events: judged }]];
  const events = [LIKE, { ...LIKE, kind: 'song' }, { ...LIKE, user_id: '8' }];
  const site = new Tallyd({ gateway: url });
  await assert.rejects(site.publishMany(events), (error) => {
    assert.match(error.message, /2 of 3 events were not confirmed \(RefusedError 1, LimitedError 1\)/);
    const [like, refused, limited] = error.results;
    assert.deepEqual([like, refused.reason, limited.waitMs], [LIKE, 'unknown-kind', 1_500]);
    assert.ok(error.name === 'PublishManyError' && refused instanceof RefusedError && limited instanceof LimitedError);
    assert.deepEqual(error.events, [events[2]]);
    return true;
  });
  await site.close();
});

test('new events get what they lack', async () => {
  const site = new Tallyd({ gateway: url });
  const [like, count] = [LIKE, COUNT].map(({ at, event_id, ...rest }) => rest);
  assert.equal((await site.publishMany(new Set([like, count]))).length, 2);
  assert.deepEqual(await site.publishMany([]), []);
  const [[first, second]] = seen.posted;
  assert.ok(first.at < second.at && second.event_id.length === 36);
  await site.close();
});

test('one event that is refused keeps the list from being sent', async () => {
  const site = new Tallyd({ gateway: url });
  const refused = { name: 'RefusedError', reason: 'target-id-out-of-range', message: /event 1 of the list/ };
  await assert.rejects(site.publishMany([LIKE, { ...LIKE, target_id: 0 }]), refused);
  assert.deepEqual(seen.posted, []);
});

test('a long list is several requests', async () => {
  const site = new Tallyd({ gateway: url });
  assert.equal((await site.publishMany(Array(1_001).fill(LIKE))).length, 1_001);
  assert.deepEqual(seen.posted.map(({ length }) => length), [1_000, 1]);
  await site.close();
});

test('results keep the order of the list', async () => {
  const publisher = Object.assign(new Broker(), { nacked: ['43'] });
  const [nacked, like, last] = await send([{ ...VIEW, target_id: '43' }, LIKE, VIEW], { publisher });
  assert.ok(nacked instanceof NackedError && nacked.event.target_id === '43', nacked);
  assert.deepEqual([like.user_id, last], ['7', VIEW]);
});

test('whatever is no announcement changes nothing', async () => {
  assert.deepEqual(announced('{"api": ["video:like"], "later": 1}'), { byApi: new Set(['video:like']) });
  assert.deepEqual(announced('{"api": []}'), { byApi: new Set() });
  const texts = ['{"api": ["video:like"]}', null, 'null', '[]', '{}', '{"api": 1}', 'no JSON'];
  let now = 0;
  const followed = new Writers(async () => texts.shift(), () => now);
  for (; texts.length > 0; now += 10_000) assert.deepEqual(await followed.byApi(), new Set(['video:like']));
});

test('all clients change at the announced instant', () => {
  const change = announced('{"api": [], "next": ["video:like"], "from": 1795251396004538}');
  assert.deepEqual(at(change, 1795251396004537), new Set());
  assert.deepEqual(at(change, 1795251396004538), new Set(['video:like']));
});

test('one call in ten seconds asks and the others do not wait', async () => {
  let now = 0;
  const asked = [];
  const followed = new Writers(() => new Promise((resolve) => asked.push(resolve)), () => now);
  const known = new Set(['video:like']);
  const first = Promise.all([followed.byApi(), followed.byApi()]);
  asked[0]('{"api": ["video:like"]}');
  // Before the first answer, the client does not know which program counts.
  assert.deepEqual(await first, [known, known]);
  now = 9_999;
  assert.deepEqual(await followed.byApi(), known);
  assert.equal(asked.length, 1);
  now = 10_000;
  const asking = followed.byApi();
  assert.deepEqual(await followed.byApi(), known);
  asked[1]('{"api": []}');
  assert.deepEqual([await asking, await followed.byApi(), asked.length], [new Set(), new Set(), 2]);
});

test('an unreachable or silent Redis changes nothing', async () => {
  const silent = net.createServer((socket) => socket.on('error', () => {})).listen(0, '127.0.0.1');
  await new Promise((resolve) => silent.once('listening', resolve));
  for (const port of [silent.address().port, 1]) {
    const reader = new Reader(`redis://127.0.0.1:${port}`, { keyPrefix: 'tally:' }, 1_000);
    const began = performance.now();
    assert.deepEqual(await new Writers(() => reader.writers()).byApi(), new Set());
    assert.ok(performance.now() - began < 5_000);
    reader.close();
  }
  silent.close();
});
