import asyncio
import unittest

from tallyd.groups import Groups, Message

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def event(number, **more):
    return Message("e", str(number), b'{"n":%d}' % number, None)._replace(**more)


def grouped(group_s=0.0):
    """Runs a test with groups and the list of the messages that they send."""

    def decorate(test):
        def run(self):
            async def main():
                sent = []

                async def send(message):
                    sent.append(message)

                await test(self, Groups(group_s, send), sent)

            asyncio.run(main())

        return run

    return decorate


def later():
    return asyncio.get_running_loop().time() + 60


class Joined(unittest.TestCase):
    @grouped()
    async def test_events_of_one_turn_are_one_list(self, groups, sent):
        await asyncio.gather(*(groups.add(event(number), later()) for number in (1, 3, 2)))
        self.assertEqual(sent, [event(1, body=b'[{"n":1},{"n":3},{"n":2}]')])

    @grouped()
    async def test_an_event_alone_has_its_trace_as_a_header(self, groups, sent):
        await groups.add(event(1, traceparent=TRACE), later())
        self.assertEqual(sent, [event(1, traceparent=TRACE)])

    @grouped()
    async def test_an_event_of_a_list_has_its_trace_as_its_first_field(self, groups, sent):
        await asyncio.gather(groups.add(event(1), later()), groups.add(event(2, traceparent=TRACE), later()))
        self.assertEqual(sent[0].body, b'[{"n":1},{"traceparent":"%s","n":2}]' % TRACE.encode())

    @grouped(0.03)
    async def test_an_event_after_a_shorter_pause_waits_for_the_rest_of_it(self, groups, sent):
        began = asyncio.get_running_loop().time()
        await groups.add(event(1), later())
        await asyncio.gather(groups.add(event(2), later()), groups.add(event(3), later()))
        self.assertGreater(asyncio.get_running_loop().time() - began, 0.029)
        self.assertEqual([message.body for message in sent], [b'{"n":1}', b'[{"n":2},{"n":3}]'])

    @grouped(60)
    async def test_a_full_list_goes_at_once_and_none_is_larger(self, groups, sent):
        await groups.add(event(0), later())
        calls = [groups.add(event(number), later()) for number in range(101)]
        await asyncio.gather(*calls[:100])
        calls += [groups.add(event(number, body=b" " * 65_536), later()) for number in range(4)]
        groups.flush()
        await asyncio.gather(*calls)
        self.assertEqual([message.body.count(b",") + 1 for message in sent], [1, 100, 4, 1])

    @grouped(60)
    async def test_an_event_for_another_exchange_or_partition_is_in_no_list_of_others(self, groups, sent):
        await groups.add(event(0), later())
        events = [event(1), event(2, is_alone=True), event(3), event(4, exchange="f")]
        calls = [groups.add(each, later()) for each in events]
        groups.flush()
        await asyncio.gather(*calls)
        self.assertEqual([message.routing_key for message in sent], ["0", "2", "1", "4"])

    @grouped(0.01)
    async def test_a_list_is_tried_until_the_last_deadline_of_its_events(self, groups, sent):
        await groups.add(event(0), later())
        tried = asyncio.get_running_loop().create_future()

        async def send(message):
            await tried

        groups._send = send
        soon = asyncio.get_running_loop().time() + 0.05
        first, second = groups.add(event(1), soon), groups.add(event(2), later())
        await asyncio.sleep(0.1)
        tried.set_result(None)
        await asyncio.wait_for(asyncio.gather(first, second), 10)

    @grouped(60)
    async def test_an_error_of_a_list_is_the_error_of_each_of_its_events(self, groups, sent):
        await groups.add(event(0), later())

        async def send(message):
            raise ValueError(message.routing_key)

        groups._send = send
        calls = [groups.add(event(number), later()) for number in (1, 2)]
        groups.flush()
        errors = await asyncio.gather(*calls, return_exceptions=True)
        self.assertEqual(list(map(str, errors)), ["1", "1"])


if __name__ == "__main__":
    unittest.main()
