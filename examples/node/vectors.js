#!/usr/bin/env node
// Checks client.js, board.js and sets.js with the test cases in tests/vectors, which tallyd must also pass. This check
// needs no server. To check your own client, replace the imports.

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { pack, periodOf, unpack } from './board.js';
import { countEventOf, defaults, eventOf, isMissing, keysOf, missingName, numberIn, Refused } from './client.js';
import { setEventOf } from './sets.js';

function madeOrRefused(make, body, refused) {
  if (!refused) return assert.deepEqual(make(), body);
  assert.throws(make, (error) => error instanceof Refused && error.reason === refused);
}

const checks = {
  buckets({ bucket_bits: bucketBits, kind, id, key, recent, missing }) {
    assert.deepEqual(keysOf({ ...defaults, bucketBits }, kind, id), [key, ...recent]);
    assert.equal(missingName(key), missing);
  },
  values({ loaded, value, place, number, note_missing: noteMissing }) {
    const found = numberIn(loaded, value, place);
    assert.equal(found === null ? null : String(found), number);
    assert.equal(isMissing(loaded), noteMissing);
  },
  events({ event: { type, kind, target_id: target, user_id: user, at, count }, body, refused }) {
    madeOrRefused(() => eventOf(defaults, type, kind, target, user, at, count), body, refused);
  },
  counts({ event: { kind, target_id: target, metric, delta, event_id: id, at }, body, refused }) {
    madeOrRefused(() => countEventOf(defaults, kind, target, metric, delta, id, at), body, refused);
  },
  sets({ event: { type, kind, target_id: target, metric, value, at }, body, refused }) {
    madeOrRefused(() => setEventOf(defaults, type, kind, target, metric, value, at), body, refused);
  },
  scores({ low_bits: lowBits, primary, low, score }) {
    const make = () => pack(Number(primary), Number(low), lowBits);
    if (score === null) return assert.throws(make, RangeError);
    assert.equal(String(make()), score);
    assert.deepEqual(unpack(Number(score), lowBits).map(String), [primary, low]);
  },
  periods({ period, instant, time_zone: timeZone, week_starts: weekStarts, name }) {
    assert.equal(periodOf(period, Date.parse(instant), timeZone, weekStarts), name);
  },
};

for (const [name, check] of Object.entries(checks)) {
  const vectors = JSON.parse(readFileSync(new URL(`../../tests/vectors/${name}.json`, import.meta.url), 'utf8'));
  for (const vector of vectors) {
    try {
      check(vector);
    } catch (error) {
      process.exitCode = 1;
      console.error(`${name}: ${JSON.stringify(vector)}: ${error.message}`);
    }
  }
  console.log(`${name}: ${vectors.length}`);
}
