"""The launching process and its workers talk, and the launching process stays in charge."""

import evenstep


def main(world, rounds):
    for i in range(rounds):
        world.send(f"round {i}")  # to on_message, in the launching process
    return world.receive(timeout_s=60)  # waits for handle.send


if __name__ == "__main__":
    messages = []
    with evenstep.launch(
        main, 3, nproc=2, join=False, on_message=lambda rank, text: messages.append((rank, text))
    ) as handle:
        handle.send("go on")
        print(handle.wait(timeout_s=60), handle.poll())  # rank 0's value, and whether all went well
    print(len(messages), "messages")
