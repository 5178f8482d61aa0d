"""Store the configuration: organisations, API keys, rooms, event types, subscriptions, queues.

The API writes it in ordinary transactions (SQLAlchemy Core). Publishers and workers keep copies of
what they need and notice a change by a version. Every change of a room, its event types or its
subscriptions begins with `rooms.touch_room`, which locks the room and counts its plan version up.

    api_keys            organisations, api_keys      keys, their scopes, and who sends a request
    rooms               rooms                        settings that subscriptions inherit
    event_types         event_types, event_type_versions
    subscriptions       subscriptions                with native ones and operational endpoints
    shovel_schedules    shovel_schedules             automatic shovels of sidelines
    handler_queues      queues                       settings of handler queues

If a process dies here:

    before the commit           nothing has changed, and PostgreSQL releases the room's lock
    after the commit,           publishers find the new plan version at their next publish, workers
    before the notification     the subscription's new version with the next delivery; caches of
                                keys end after a second
    after a deletion was        the row is hidden and stays; a job (`rooms.db.jobs.delete`) or the
    accepted                    queue's deletion task removes the rest
"""
