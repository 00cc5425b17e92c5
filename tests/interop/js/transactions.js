// KafkaJS's transactions: classic. Behind the line protocol of tests/interop/adapters/program.py.
//
// KafkaJS has no consumer without a group: reading a topic is done by a group of its own. It does not say where a
// consumer is, so a reader waits a moment for more.

'use strict'

const readline = require('node:readline')
const { createRequire } = require('node:module')

// The packages live in the tests' cache, not beside this file.
const { Kafka, Partitioners, logLevel } = createRequire(process.argv[2] + '/')('kafkajs')

const PATIENCE_MS = 30_000
const SETTLE_MS = 200
const MARK = Buffer.from('!')
const GROUP_SETTINGS = { sessionTimeout: 10_000, heartbeatInterval: 200, maxWaitTimeInMs: 100 }

const kafka = new Kafka({
  clientId: 'kafkajs-test',
  brokers: process.argv[3].split(','),
  logLevel: logLevel.NOTHING,
  // KafkaJS gives up after a few attempts; a coordinator that ends a transaction, or moves, takes longer.
  retry: { initialRetryTime: 50, maxRetryTime: 1000, retries: 20 },
})
const producers = []
let groups = 0

const pause = ms => new Promise(resolve => setTimeout(resolve, ms))
const fields = records => records.map(each => [each.partition, each.offset, each.value.toString('base64')])

// A consumer whose records are taken from a queue. Its callback waits until a record is wanted.
class Member {
  constructor(groupId, topic, readUncommitted) {
    this.consumer = kafka.consumer({ ...GROUP_SETTINGS, groupId, readUncommitted })
    this.topic = topic
    this.queue = []
    this.error = null
    this.consumer.on(this.consumer.events.CRASH, event => (this.error = event.payload.error))
  }

  async start() {
    await this.consumer.connect()
    await this.consumer.subscribe({ topic: this.topic, fromBeginning: true })
    await this.consumer.run({
      autoCommit: false,
      eachMessage: async ({ partition, message }) => {
        this.queue.push({ partition, offset: Number(message.offset), value: message.value })
      },
    })
  }

  async receive(count) {
    const deadline = Date.now() + PATIENCE_MS
    while (this.queue.length < count) {
      if (this.error !== null) throw this.error
      if (Date.now() > deadline) break
      await pause(10)
    }
    return this.queue.splice(0, count)
  }

  stop() {
    return this.consumer.disconnect()
  }
}

async function open({ id, timeout_ms: transactionTimeout, group, source }) {
  const producer = kafka.producer({
    transactionalId: id,
    transactionTimeout,
    idempotent: true,
    maxInFlightRequests: 1,
    createPartitioner: Partitioners.DefaultPartitioner,
  })
  await producer.connect()
  // Only a transaction asks for the producer id; nothing is sent for its beginning.
  const made = { producer, transaction: await producer.transaction(), group, source, member: null }
  if (group !== null) {
    made.member = new Member(group, source, false)
    await made.member.start()
  }
  return producers.push(made) - 1
}

async function begin(made) {
  if (!made.transaction.isActive()) made.transaction = await made.producer.transaction()
}

async function send(made, topic, messages) {
  const answers = await made.transaction.send({ topic, messages, acks: -1 })
  const next = new Map(answers.map(each => [each.partition, Number(each.baseOffset)]))
  return messages.map(({ partition }) => {
    const offset = next.get(partition)
    next.set(partition, offset + 1)
    return [partition, offset]
  })
}

async function transform(made, topic, count) {
  await begin(made)
  const received = await made.member.receive(count)
  if (received.length < count) throw new Error(`${received.length} of ${count} records came`)
  await send(
    made,
    topic,
    received.map(({ partition, value }) => ({ partition, value: Buffer.concat([value, MARK]) }))
  )
  const offsets = new Map(received.map(({ partition, offset }) => [partition, offset + 1]))
  const partitions = [...offsets].map(([partition, offset]) => ({ partition, offset: String(offset) }))
  await made.transaction.sendOffsets({
    consumerGroupId: made.group,
    topics: [{ topic: made.source, partitions }],
  })
  return fields(received)
}

async function close(made) {
  if (made.member !== null) await made.member.stop()
  await made.producer.disconnect()
}

async function read({ topic, isolation, count, linger_ms: linger }) {
  const member = new Member(`kafkajs-reader-${process.pid}-${groups++}`, topic, isolation === 'read_uncommitted')
  await member.start()
  try {
    const received = await member.receive(count)
    await pause(Math.max(linger, SETTLE_MS))
    return { records: fields(received.concat(member.queue)), positions: null }
  } finally {
    await member.stop()
  }
}

const outgoing = records =>
  records.map(({ partition, value }) => ({ partition, value: Buffer.from(value, 'base64') }))

const commands = {
  open,
  begin: ({ producer }) => begin(producers[producer]),
  send: ({ producer, topic, records }) => send(producers[producer], topic, outgoing(records)),
  transform: ({ producer, topic, count }) => transform(producers[producer], topic, count),
  end: ({ producer, commit }) =>
    commit ? producers[producer].transaction.commit() : producers[producer].transaction.abort(),
  close: ({ producer }) => close(producers[producer]),
  read,
}

// Errors arrive wrapped in those of retries.
function errorName(error) {
  return error.type ?? (error.cause ? errorName(error.cause) : error.name)
}

async function main() {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const command = JSON.parse(line)
    let answer
    try {
      answer = { result: (await commands[command.do](command)) ?? null }
    } catch (error) {
      answer = { error: errorName(error), message: String(error.stack) }
    }
    process.stdout.write(JSON.stringify(answer) + '\n')
  }
  process.exit(0)
}

main()
