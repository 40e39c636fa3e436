// Calls the installed package for the tests. Calls and results are lines of JSON, and calls run at the same time.

import { createInterface } from 'node:readline';
import { Tallyd } from 'tallyd';

// The scenario uses the names and units of the Python package.
const camel = (name) => name.replace(/_([a-z])/g, (_, letter) => letter.toUpperCase());
const one = ([name, value]) => (name === 'deadline_s' ? ['deadlineMs', value * 1_000] : [camel(name), value]);
const renamed = (options) => Object.fromEntries(Object.entries(options).map(one));
const say = (answer) => console.log(JSON.stringify(answer));

let site;
for await (const line of createInterface({ input: process.stdin })) {
  const { id, do: method, with: given, options } = JSON.parse(line);
  if (method === 'open') {
    await site?.close();
    site = new Tallyd(renamed(options));
    say({ id, value: null });
    continue;
  }
  const more = Object.keys(options).length > 0 ? [renamed(options)] : [];
  site[camel(method)](...given, ...more).then(
    (value) => say({ id, value: value instanceof Map ? [...value] : value }),
    (error) => say({ id, error: error.name, message: error.message, event: error.event ?? error.events ?? null }),
  );
}
await site.close();
