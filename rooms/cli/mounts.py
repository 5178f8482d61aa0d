"""Which commands there are, in the order in which the help shows them."""

from typing import Final

from rooms.cli.group import Mount

_SERVICE: Final = "The service"
_SETTING_UP: Final = "Setting up"
_MESSAGES: Final = "Messages"

MOUNTS: Final = (
    Mount("dev", "rooms.cli.dev:dev", "Everything on this machine: PostgreSQL, API, worker, upkeep.", _SERVICE),
    Mount("full", "rooms.cli.full:full", "The same on Artemis and ZooKeeper, started here too.", _SERVICE),
    Mount("serve", "rooms.cli.process:serve", "The API alone.", _SERVICE),
    Mount("worker", "rooms.cli.process:worker", "A push worker alone.", _SERVICE),
    Mount("relay", "rooms.cli.process:relay", "A relay alone, where BROKER_URL is not PostgreSQL.", _SERVICE),
    Mount("upkeep", "rooms.cli.process:upkeep", "The upkeep alone.", _SERVICE),
    Mount("standalone", "rooms.cli.process:standalone", "All of these in one process; --standby: in turn.", _SERVICE),
    Mount("migrate", "rooms.cli.process:migrate", "Bring the database to this version's schema.", _SERVICE),
    Mount("cluster", "rooms.cli.cluster:cluster", "Who leads, and which process does what.", _SERVICE),
    Mount("buckets", "rooms.cli.cluster:buckets", "In how many parts the members share what is due later.", _SERVICE),
    Mount("retention", "rooms.cli.retention:retention", "What is old enough to go, and what must stay.", _SERVICE),
    Mount("key", "rooms.cli.key:key", "API keys, made directly in the database.", _SETTING_UP),
    Mount("room", "rooms.cli.room:room", "Rooms and their retry policy.", _SETTING_UP),
    Mount(
        "event-type", "rooms.cli.event_type:event_type", "Event types and the versions of their schema.", _SETTING_UP
    ),
    Mount("subscription", "rooms.cli.subscription:subscription", "Who gets the messages, PUSH or PULL.", _SETTING_UP),
    Mount("publish", "rooms.cli.publish:publish", "Publish a message, or a file of them.", _MESSAGES),
    Mount("pull", "rooms.cli.pull:pull", "Fetch and acknowledge what waits for a PULL subscription.", _MESSAGES),
    Mount("stream", "rooms.cli.stream:stream", "Messages of PULL subscriptions as they come.", _MESSAGES),
    Mount("listen", "rooms.cli.listen:listen", "Receive webhooks here, show and verify them.", _MESSAGES),
    Mount("messages", "rooms.cli.message:messages", "The messages of a room.", _MESSAGES),
    Mount(
        "message", "rooms.cli.message:message", "Look at one message, withdraw or move it before it is due.", _MESSAGES
    ),
    Mount("journey", "rooms.cli.message:journey", "What happened to one message, step by step.", _MESSAGES),
    Mount("deliveries", "rooms.cli.delivery:deliveries", "The deliveries of a subscription.", _MESSAGES),
    Mount("redeliver", "rooms.cli.delivery:redeliver", "Send one delivery again.", _MESSAGES),
    Mount("restore", "rooms.cli.restore:restore", "Bring back what is unfinished, or what ended.", _MESSAGES),
    Mount("clear", "rooms.cli.restore:clear", "Cancel what is unfinished in a room.", _MESSAGES),
    Mount("replay", "rooms.cli.restore:replay", "Give past messages to a subscription.", _MESSAGES),
    Mount("recover", "rooms.cli.restore:recover", "Send again what a broker has lost.", _MESSAGES),
    Mount("jobs", "rooms.cli.restore:jobs", "The jobs that were asked for.", _MESSAGES),
    Mount("job", "rooms.cli.job:job", "How far a long-running job is; or cancel it.", _MESSAGES),
)
