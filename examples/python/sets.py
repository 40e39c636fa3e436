"""Makes events that set a number, for instance the number of unread messages. Publish them with `like.publish`."""

from like import KINDS, METRICS, Refused, a_time, an_id

SETTABLE = {"unread": {"video"}}  # metrics whose [[rule]] says settable = true, and their kinds


def set_event_of(event_type, kind, target_id, metric, value, at):
    """Returns an event that sets a number to a value (`set`) or to zero (`reset`). The event with the newest `at` wins,
    in any order of arrival."""
    if event_type not in ("set", "reset"):
        raise Refused("unknown-type", event_type)
    if kind not in KINDS:
        raise Refused("unknown-kind", kind)
    event = {"type": event_type, "kind": kind, "target_id": an_id(target_id), "metric": metric}
    if metric not in METRICS and metric not in SETTABLE:
        raise Refused("unknown-metric", metric)
    if kind not in SETTABLE.get(metric, ()):
        raise Refused("not-settable", metric)
    if event_type == "set":
        # Refuse 1.0 and True, because JSON writes them differently.
        if type(value) is not int or not -(2**53) <= value <= 2**53:
            raise Refused("value-out-of-range", value)
        event["value"] = value
    return {**event, "at": a_time(at)}
