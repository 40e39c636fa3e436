import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { test } from 'node:test';
import { DEFAULT } from '../src/card.js';
import { bucketOf, numberIn, read } from '../src/counters.js';
import { checked, Clock, routingKeyOf } from '../src/events.js';
import { RefusedError, ReturnedError, Tallyd, UnconfirmedError } from '../src/index.js';

const vectors = (name) => JSON.parse(readFileSync(new URL(`../../../tests/vectors/${name}.json`, import.meta.url), 'utf8'));
const CARD = { ...DEFAULT, kinds: { video: 1, post: 2 }, metrics: { like: 1, view: 2, unread: 3 }, settable: ['video:unread'] };
const AMQP = { amqpUrl: 'amqp://127.0.0.1:1' };

test('events are made and refused as by the daemon', () => {
  for (const name of ['events', 'counts', 'sets']) {
    for (const { event, body, refused } of vectors(name)) {
      const make = () => checked({ type: 'count', ...event, at: BigInt(event.at) }, CARD);
      if (refused) {
        assert.throws(make, { reason: refused }, JSON.stringify(event));
        continue;
      }
      // These clients don't call the scripts, so their events have no `count`.
      delete body.count;
      assert.deepEqual(JSON.parse(JSON.stringify(make())), body);
    }
  }
});

test("buckets have the daemon's names", () => {
  for (const { kind, id, bucket_bits: bucketBits, key, missing } of vectors('buckets')) {
    const card = { form: 'packed', bucketBits };
    assert.deepEqual([read({ hmGet: (name) => name }, card, 'tally:', kind, 'like', id), bucketOf(card, kind, id)], [key, missing]);
  }
});

test('numbers are read as by the daemon', () => {
  for (const { loaded, value, place, number } of vectors('values')) {
    const card = { form: 'packed', metrics: { it: place }, belowZero: ['video:it'] };
    assert.equal(numberIn(card, 'video', 'it', [loaded, value]), number === null ? null : Number(number));
  }
});

test('ids are never unsafe numbers', async () => {
  const site = new Tallyd(AMQP);
  for (const bad of [0, -1, 1.5, NaN, Infinity, 2 ** 53, 9007199254740993, 2n ** 63n, 0n, true, '042', '', '42\n', '4e2', '٤٢', null, undefined, [1]]) {
    await assert.rejects(site.like('video', bad, 7), { name: 'RefusedError', reason: 'target-id-out-of-range' });
    await assert.rejects(site.unlike('video', 42, bad), { name: 'RefusedError', reason: 'user-id-out-of-range' });
    await assert.rejects(site.counts('video', [bad]), { reason: 'target-id-out-of-range' });
  }
  await assert.rejects(site.like('video', 9007199254740993, 7), /as text or as a BigInt/);
  const like = (id) => checked({ type: 'like', kind: 'video', target_id: id, user_id: 7, at: 1795251385000001 }, CARD).target_id;
  assert.deepEqual([42, 2n ** 63n - 1n, '9007199254740993'].map(like), ['42', '9223372036854775807', '9007199254740993']);
});

test('what JSON can not say is refused', async () => {
  const site = new Tallyd(AMQP);
  const calls = [
    [site.count('video', 42, 'view', 1.5), 'delta-out-of-range'],
    [site.count('video', 42, 'view', '1'), 'delta-out-of-range'],
    [site.count('video', 42, 'view', 1, { eventId: '\ud800' }), 'event-id-out-of-range'],
    [site.count('video', 42, 'view', 1, { eventId: '😀'.repeat(65) }), 'event-id-out-of-range'],
    [site.count('video', 42, 'like'), 'unknown-metric'],
    [site.set('video', 42, 'unread', 2n ** 53n + 1n), 'value-out-of-range'],
    [site.set('video', 42, 'unread', '9007199254740992'), 'value-out-of-range'],
    [site.like('\ud800', 42, 7), 'unknown-kind'],
    [site.like('video', 42, 7, { at: 1.5 }), 'at-out-of-range'],
    [site.like('video', 42, 7, { at: 2n ** 53n + 1n }), 'at-out-of-range'],
    [site.publish({ type: 'like', kind: 'video', target_id: 1, user_id: 1 }), 'at-out-of-range'],
  ];
  for (const [call, reason] of calls) await assert.rejects(call, { reason });
  assert.equal(checked({ type: 'set', kind: 'video', target_id: 1, metric: 'unread', value: -(2n ** 53n), at: 1795251385000001n }, CARD).value, -(2 ** 53));
});

test('a missing server is said before anything is sent', async () => {
  await assert.rejects(new Tallyd().like('video', 1, 1), /amqpUrl/);
  await assert.rejects(new Tallyd().counts('video', [1]), /redisUrl or gateway/);
  await assert.rejects(new Tallyd().liked('video', [1], 1), /pass gateway/);
  for (const settings of [{ deadlineMs: 0 }, { gateway: 'ftp://127.0.0.1' }]) assert.throws(() => new Tallyd(settings), TypeError);
  assert.equal((await new Tallyd().counts('video', [])).size, 0);
  const closed = new Tallyd(AMQP);
  await closed.close();
  await assert.rejects(closed.like('video', 1, 1), /closed/);
});

test('the routing key follows the setting', () => {
  const like = { target_id: '42', user_id: '7' };
  assert.deepEqual(['user', 'target'].map((by) => routingKeyOf(like, by)), ['7', '42']);
  assert.equal(routingKeyOf({ target_id: '42' }, 'user'), '42');
});

test('no two clicks have the same instant', () => {
  const times = [5_000_000, 5_000_000, 4_999_000, 6_000_000, 1_000_000];
  const clock = new Clock(() => times.shift());
  // Before the last call, the clock goes back by five seconds. The last call returns this corrected time.
  assert.deepEqual(Array.from({ length: 5 }, () => clock.at()), [5_000_000, 5_000_001, 5_000_002, 6_000_000, 1_000_000]);
});

test('errors have names', () => {
  assert.equal(String(new ReturnedError('late', {})), 'ReturnedError: late');
  assert.ok(new RefusedError('x', 'y') instanceof Error && new UnconfirmedError('x', {}).event);
});
