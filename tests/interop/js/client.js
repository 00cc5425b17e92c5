// KafkaJS behind the line protocol of tests/interop/adapters/program.py.
//
// KafkaJS has no consumer without a group: reading from given offsets is done by a group of its own, which seeks
// as soon as it has its partitions. It also answers per partition, not per record, so positions are counted here.

'use strict'

const { readFileSync } = require('node:fs')
const readline = require('node:readline')
const { createRequire } = require('node:module')

// The packages live in the tests' cache, not beside this file.
const installed = createRequire(process.argv[2] + '/')
const { AssignerProtocol, CompressionCodecs, CompressionTypes, ConfigResourceTypes, Kafka, Partitioners, logLevel } =
  installed('kafkajs')
const lz4 = installed('lz4-napi')
const zstd = installed('@bokuweb/zstd-wasm')

const PATIENCE_MS = 30_000
const CODECS = { none: 'None', gzip: 'GZIP', snappy: 'Snappy', lz4: 'LZ4', zstd: 'ZSTD' }
const DYNAMIC_TOPIC_CONFIG = 1
const GROUP_SETTINGS = { sessionTimeout: 10_000, heartbeatInterval: 200, maxWaitTimeInMs: 100 }

CompressionCodecs[CompressionTypes.Snappy] = installed('kafkajs-snappy')
CompressionCodecs[CompressionTypes.LZ4] = () => ({
  compress: encoder => lz4.compressFrame(encoder.buffer),
  decompress: buffer => lz4.decompressFrame(buffer),
})
CompressionCodecs[CompressionTypes.ZSTD] = () => ({
  compress: async encoder => Buffer.from(zstd.compress(encoder.buffer, 3)),
  decompress: async buffer => Buffer.from(zstd.decompress(buffer)),
})

// How to connect and to prove who it is, under librdkafka's names.
function secured(asked) {
  if (!asked['security.protocol']) return {}
  const read = name => (asked[name] ? readFileSync(asked[name], 'utf8') : undefined)
  const ssl = {
    ca: [read('ssl.ca.location')],
    cert: read('ssl.certificate.location'),
    key: read('ssl.key.location'),
  }
  const [username, password] = [asked['sasl.username'], asked['sasl.password']]
  const mechanism = asked['sasl.mechanism']?.toLowerCase()
  return { ssl, sasl: mechanism && { mechanism, username, password } }
}

const kafka = new Kafka({
  ...secured(JSON.parse(process.env.PENSTOCK_TEST_SECURITY ?? '{}')),
  clientId: 'kafkajs-test',
  brokers: [process.argv[3]],
  logLevel: logLevel.NOTHING,
  retry: { initialRetryTime: 50, retries: 5 },
})
const admin = kafka.admin()
const members = []
let groups = 0

const bytes = text => (text === null ? null : Buffer.from(text, 'base64'))
const seeks = pairs => pairs.map(([partition, offset]) => ({ partition, offset: String(offset) }))
const text = buffer => (buffer === null || buffer === undefined ? null : buffer.toString('base64'))

function fields(partition, message) {
  const headers = Object.entries(message.headers ?? {}).flatMap(([name, value]) =>
    (Array.isArray(value) ? value : [value]).map(each => [name, text(each)])
  )
  const { key, value } = message
  return [partition, Number(message.offset), Number(message.timestamp), text(key), text(value), headers]
}

// Reading and writing

async function produce({ topic, records, codec, acks, idempotent }) {
  const chosen = []
  const producer = kafka.producer({
    idempotent,
    allowAutoTopicCreation: false,
    createPartitioner: () => {
      const choose = Partitioners.DefaultPartitioner()
      return record => {
        chosen.push(choose(record))
        return chosen[chosen.length - 1]
      }
    },
  })
  const messages = records.map(record => {
    const headers = {}
    for (const [name, value] of record.headers) {
      headers[name] = name in headers ? [headers[name], bytes(value)].flat() : bytes(value)
    }
    return {
      key: bytes(record.key),
      value: bytes(record.value),
      headers,
      partition: record.partition ?? undefined,
      timestamp: record.timestamp === null ? undefined : String(record.timestamp),
    }
  })
  await producer.connect()
  try {
    const answers = await producer.send({
      topic,
      messages,
      acks: { 0: 0, 1: 1, all: -1 }[acks],
      compression: CompressionTypes[CODECS[codec]],
    })
    const next = new Map((answers ?? []).map(each => [each.partition, Number(each.baseOffset)]))
    return chosen.map(partition => {
      const offset = next.get(partition) ?? -1
      next.set(partition, offset < 0 ? offset : offset + 1)
      return [partition, offset]
    })
  } finally {
    await producer.disconnect()
  }
}

// Read as the only member of a group until there are `count` records, of the partitions in `starts` if given.
async function receive(groupId, topic, count, { starts = null, commit }) {
  const consumer = kafka.consumer({ ...GROUP_SETTINGS, groupId })
  const wanted = starts && new Map(starts)
  const received = []
  consumer.on(consumer.events.GROUP_JOIN, () => {
    for (const [partition, offset] of starts ?? []) consumer.seek({ topic, partition, offset: String(offset) })
  })
  await consumer.connect()
  try {
    await consumer.subscribe({ topic, fromBeginning: true })
    await new Promise((resolve, reject) => {
      const alarm = setTimeout(
        () => reject(new Error(`${received.length} of ${count} records came`)),
        PATIENCE_MS
      )
      consumer.on(consumer.events.CRASH, event => reject(event.payload.error))
      consumer
        .run({
          autoCommit: false,
          eachMessage: async ({ partition, message }) => {
            if (received.length < count && (wanted === null || wanted.has(partition))) {
              received.push(fields(partition, message))
            }
            if (received.length === count) {
              clearTimeout(alarm)
              resolve()
            }
          },
        })
        .catch(reject)
    })
    if (commit) {
      const ends = new Map(received.map(([partition, offset]) => [partition, offset + 1]))
      await consumer.commitOffsets(
        [...ends].map(([partition, offset]) => ({ topic, partition, offset: String(offset) }))
      )
    }
  } finally {
    await consumer.disconnect()
  }
  return received
}

async function consume({ topic, starts, count }) {
  return receive(`kafkajs-reader-${process.pid}-${groups++}`, topic, count, { starts, commit: false })
}

async function offset({ topic, partition, when }) {
  const found =
    typeof when === 'number'
      ? await admin.fetchTopicOffsetsByTimestamp(topic, when)
      : await admin.fetchTopicOffsets(topic)
  const field = { earliest: 'low', latest: 'high' }[when] ?? 'offset'
  return Number(found.find(each => each.partition === partition)[field])
}

// Groups

async function join({ group, topic }) {
  const consumer = kafka.consumer({ ...GROUP_SETTINGS, groupId: group })
  const member = { consumer, owned: [], revoked: 0, records: [], error: null }
  consumer.on(consumer.events.GROUP_JOIN, event => {
    member.owned = event.payload.memberAssignment[topic] ?? []
  })
  consumer.on(consumer.events.REBALANCING, () => {
    member.revoked += member.owned.length
    member.owned = []
  })
  consumer.on(consumer.events.CRASH, event => {
    member.error = event.payload.error
  })
  await consumer.connect()
  await consumer.subscribe({ topic, fromBeginning: true })
  await consumer.run({
    eachMessage: async ({ partition, message }) => {
      member.records.push(fields(partition, message))
    },
  })
  return members.push(member) - 1
}

function handOver(member) {
  if (member.error !== null) throw member.error
  return member.records.splice(0)
}

async function leave({ member: number }) {
  const member = members[number]
  await member.consumer.disconnect()
  member.owned = []
  return handOver(member)
}

async function describeGroup({ group }) {
  const described = (await admin.describeGroups([group])).groups[0]
  return {
    state: described.state,
    assignor: described.protocol,
    members: described.members.map(member => ({
      client_id: member.clientId,
      partitions: Object.values(AssignerProtocol.MemberAssignment.decode(member.memberAssignment).assignment).flat(),
    })),
  }
}

async function committed({ group, topic, partitions }) {
  const [{ partitions: found }] = await admin.fetchOffsets({ groupId: group, topics: [topic] })
  return found
    .filter(each => partitions.includes(each.partition))
    .map(each => [each.partition, Number(each.offset)])
}

// Topics, settings and the cluster

async function createTopic({ topic, partitions, configs }) {
  const configEntries = Object.entries(configs).map(([name, value]) => ({ name, value }))
  const created = await admin.createTopics({
    topics: [{ topic, numPartitions: partitions, replicationFactor: 1, configEntries }],
  })
  // The one error that KafkaJS turns into a value.
  if (!created) throw Object.assign(new Error(topic), { type: 'TOPIC_ALREADY_EXISTS' })
}

async function deleteRecords({ topic, before }) {
  await admin.fetchTopicOffsets(topic) // only topics that were asked for before are known to deleteTopicRecords
  await admin.deleteTopicRecords({ topic, partitions: seeks(before) })
}

async function describeTopic({ topic }) {
  const { topics } = await admin.fetchTopicMetadata({ topics: [topic] })
  return topics[0].partitions.map(each => [each.partitionId, each.leader, each.replicas, each.isr])
}

async function describeConfigs({ topic }) {
  const { resources } = await admin.describeConfigs({
    includeSynonyms: false,
    resources: [{ type: ConfigResourceTypes.TOPIC, name: topic }],
  })
  return resources[0].configEntries.map(each => [
    each.configName,
    each.configValue,
    each.configSource !== DYNAMIC_TOPIC_CONFIG,
  ])
}

async function alterConfig({ topic, name, value }) {
  // Only AlterConfigs, which replaces everything: what is to stay has to be sent again.
  const own = (await describeConfigs({ topic })).filter(([, , isDefault]) => !isDefault)
  const wanted = new Map(own.map(([key, kept]) => [key, kept]))
  wanted.delete(name)
  if (value !== null) wanted.set(name, value)
  const configEntries = [...wanted].map(([key, each]) => ({ name: key, value: each }))
  await admin.alterConfigs({
    validateOnly: false,
    resources: [{ type: ConfigResourceTypes.TOPIC, name: topic, configEntries }],
  })
}

async function describeCluster() {
  const { brokers, controller, clusterId } = await admin.describeCluster()
  return {
    cluster_id: clusterId,
    controller_id: controller,
    brokers: brokers.map(each => [each.nodeId, each.host, each.port]),
  }
}

const commands = {
  produce,
  consume,
  offset,
  join,
  leave,
  member: async ({ member: number }) => {
    const member = members[number]
    return { partitions: member.owned, revoked: member.revoked, records: handOver(member) }
  },
  resume: ({ group, topic, count }) => receive(group, topic, count, { commit: true }),
  groups: async () => (await admin.listGroups()).groups.map(each => each.groupId),
  describe_group: describeGroup,
  committed,
  alter_committed: ({ group, topic, offsets }) =>
    admin.setOffsets({ groupId: group, topic, partitions: seeks(offsets) }),
  delete_group: async ({ group }) => void (await admin.deleteGroups([group])),
  create_topic: createTopic,
  delete_topic: ({ topic }) => admin.deleteTopics({ topics: [topic] }),
  create_partitions: async ({ topic, count }) =>
    void (await admin.createPartitions({ topicPartitions: [{ topic, count }] })),
  delete_records: deleteRecords,
  topics: () => admin.listTopics(),
  describe_topic: describeTopic,
  describe_configs: describeConfigs,
  alter_config: alterConfig,
  describe_cluster: describeCluster,
}

// Errors arrive wrapped: in retries, in aggregates, per group or per partition.
function errorName(error) {
  const inner = error.errors ?? error.groups?.map(each => each.error) ?? error.partitions?.map(each => each.error)
  return error.type ?? (inner?.length ? errorName(inner[0]) : error.cause ? errorName(error.cause) : error.name)
}

async function main() {
  await zstd.init()
  let connected = null
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const command = JSON.parse(line)
    let answer
    try {
      await (connected ??= admin.connect())
      answer = { result: (await commands[command.do](command)) ?? null }
    } catch (error) {
      answer = { error: errorName(error), message: String(error.stack) }
    }
    process.stdout.write(JSON.stringify(answer) + '\n')
  }
  process.exit(0)
}

main()
