import assert from 'node:assert/strict';
import http from 'node:http';
import net from 'node:net';
import { after, before, beforeEach, test } from 'node:test';
import { DEFAULT } from '../src/card.js';
import { LimitedError, NackedError, RefusedError, RejectedError, Tallyd, UnconfirmedError } from '../src/index.js';
import { ToRabbitmq } from '../src/sender.js';

const LIKE = { type: 'like', kind: 'video', target_id: '42', user_id: '7', at: 5 };
const COUNT = { type: 'count', kind: 'video', target_id: '42', metric: 'share', delta: 1, event_id: 'e', at: 6 };

const verdicts = (verdict) => (events) => ({ events: events.map((event) => verdict(event)) });
const confirmed = (events) => [202, verdicts(({ at }) => ({ verdict: 'confirmed', at }))(events)];
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

async function publish(events, settings) {
  const site = new Tallyd({ gateway: url, ...settings });
  try {
    return await site.publishMany(events);
  } catch (error) {
    return error.results;
  } finally {
    await site.close();
  }
}

test('the client asks for the trace at each publish', async () => {
  let calls = 0;
  const site = new Tallyd({ gateway: url, traceparent: () => `trace-${++calls}` });
  await site.like('video', 42, 7);
  await site.publishMany([LIKE, COUNT]);
  await site.close();
  assert.deepEqual(seen.traces, ['trace-1', 'trace-2']);
});

test('what the gateway has not confirmed is sent again', async () => {
  seen.answers = [busy, unconfirmed, confirmed];
  assert.deepEqual(await publish([LIKE, COUNT]), [LIKE, COUNT]);
  assert.deepEqual(seen.posted, [[LIKE, COUNT], [LIKE, COUNT], [LIKE, COUNT]]);
  seen.answers = [unconfirmed];
  const [late] = await publish([LIKE], { deadlineMs: 300 });
  assert.ok(late instanceof UnconfirmedError && late.event.at === 5 && late.message.includes('the broker is unreachable'), late);
});

test('what the gateway may have published is not sent again', async () => {
  const site = new Tallyd({ gateway: url });
  await site.publish(LIKE);
  seen.answers = [none, confirmed];
  await assert.rejects(site.publish(COUNT), { name: 'UnconfirmedError', message: /no answer/, event: COUNT });
  assert.deepEqual(seen.posted, [[LIKE], [COUNT]]);
  await site.close();
});

test('an unreachable gateway is asked until the deadline', async () => {
  const [away] = await publish([LIKE], { gateway: 'http://127.0.0.1:1', deadlineMs: 300 });
  assert.ok(away instanceof UnconfirmedError && away.message.includes('no connection'), away);
});

test('a wrong request is not tried again', async () => {
  seen.answers = [unauthorized];
  const [rejected] = await publish([LIKE]);
  assert.ok(rejected instanceof RejectedError && rejected.event.at === 5 && rejected.message.includes('401 (unauthorized)'), rejected);
  assert.equal(seen.posted.length, 1);
});

test('closing ends the calls in flight', async () => {
  const silent = net.createServer((socket) => socket.on('error', () => {})).listen(0, '127.0.0.1');
  await new Promise((resolve) => silent.once('listening', resolve));
  const site = new Tallyd({ amqpUrl: `amqp://127.0.0.1:${silent.address().port}`, deadlineMs: 60_000 });
  const like = site.like('video', 42, 7);
  await new Promise((resolve) => setTimeout(resolve, 50));
  const [, error] = await Promise.all([site.close(), like.catch((rejected) => rejected)]);
  assert.ok(error instanceof UnconfirmedError && error.event.user_id === '7', error);
  silent.close();
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
  const broker = {
    async publish(event) {
      if (event.target_id === '43') throw new NackedError('full', event);
    },
  };
  const [nacked, ...others] = await new ToRabbitmq(broker).publish([{ ...COUNT, target_id: '43' }, LIKE, COUNT], DEFAULT, 0);
  assert.ok(nacked instanceof NackedError && nacked.event.target_id === '43', nacked);
  assert.deepEqual(others, [LIKE, COUNT]);
});
