import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.protocol.Errors;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Transactions with Kafka's Java clients, behind the line protocol of tests/interop/adapters/program.py.
 *
 * Which generation they use, they decide themselves: 4.x speaks transactions v2 where the broker has it.
 */
public final class JavaTransactions {
    private static final long PATIENCE_MS = 30_000;
    private static final byte MARK = '!';
    private static final ObjectMapper JSON = new ObjectMapper();

    private final String bootstrap;
    private final List<Transactional> producers = new ArrayList<>();

    public static void main(String[] arguments) throws Exception {
        PrintStream answers = new PrintStream(System.out, false, StandardCharsets.UTF_8);
        JavaTransactions client = new JavaTransactions(arguments[0]);
        BufferedReader commands = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = commands.readLine(); line != null; line = commands.readLine()) {
            answers.println(JSON.writeValueAsString(client.answer(JSON.readTree(line))));
            answers.flush();
        }
        System.exit(0);
    }

    private JavaTransactions(String bootstrap) {
        this.bootstrap = bootstrap;
    }

    private Map<String, Object> answer(JsonNode command) {
        Map<String, Object> answer = new HashMap<>();
        try {
            answer.put("result", run(command));
        } catch (Throwable raised) {
            answer.put("error", nameOf(raised));
            answer.put("message", raised + ", caused by " + raised.getCause());
        }
        return answer;
    }

    /** The first error in the chain of causes that has a code of Kafka's. */
    private static String nameOf(Throwable raised) {
        for (Throwable error = raised; error != null; error = error.getCause()) {
            Errors found = Errors.forException(error);
            if (found != Errors.UNKNOWN_SERVER_ERROR) {
                return found.name();
            }
        }
        return raised.getClass().getSimpleName();
    }

    private Object run(JsonNode command) throws Exception {
        String topic = command.path("topic").asText();
        switch (command.get("do").asText()) {
            case "open":
                producers.add(new Transactional(command));
                return producers.size() - 1;
            case "read": return read(topic, command);
            default: break;
        }
        Transactional producer = producers.get(command.get("producer").asInt());
        switch (command.get("do").asText()) {
            case "begin": return producer.begin();
            case "send": return producer.send(topic, records(topic, command.get("records")));
            case "transform": return producer.transform(topic, command.get("count").asInt());
            case "end": return producer.end(command.get("commit").asBoolean());
            case "close": return producer.close();
            default: throw new IllegalArgumentException(command.toString());
        }
    }

    private static List<ProducerRecord<byte[], byte[]>> records(String topic, JsonNode records) {
        List<ProducerRecord<byte[], byte[]>> wanted = new ArrayList<>();
        for (JsonNode record : records) {
            byte[] value = Base64.getDecoder().decode(record.get("value").asText());
            wanted.add(new ProducerRecord<>(topic, record.get("partition").asInt(), null, value));
        }
        return wanted;
    }

    private KafkaConsumer<byte[], byte[]> consumer(String isolation, Map<String, Object> more) {
        Map<String, Object> settings = new HashMap<>(more);
        settings.put("bootstrap.servers", bootstrap);
        settings.put("isolation.level", isolation);
        settings.put("enable.auto.commit", false);
        return new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer());
    }

    /** A producer, with a consumer of the source if it was opened in a group. */
    private final class Transactional {
        private final KafkaProducer<byte[], byte[]> producer;
        private final KafkaConsumer<byte[], byte[]> consumer;

        Transactional(JsonNode command) {
            producer = new KafkaProducer<>(
                    Map.of(
                            "bootstrap.servers", bootstrap,
                            "transactional.id", command.get("id").asText(),
                            "transaction.timeout.ms", command.get("timeout_ms").asInt(),
                            "linger.ms", 0),
                    new ByteArraySerializer(),
                    new ByteArraySerializer());
            producer.initTransactions();
            if (command.get("group").isNull()) {
                consumer = null;
            } else {
                consumer = consumer("read_committed", Map.of(
                        "group.id", command.get("group").asText(),
                        "group.protocol", "classic",
                        "auto.offset.reset", "earliest",
                        "session.timeout.ms", 10_000,
                        "heartbeat.interval.ms", 200));
                consumer.subscribe(List.of(command.get("source").asText()));
            }
        }

        Object begin() {
            producer.beginTransaction();
            return null;
        }

        Object send(String topic, List<ProducerRecord<byte[], byte[]>> records) throws Exception {
            List<Future<RecordMetadata>> sent = new ArrayList<>();
            for (ProducerRecord<byte[], byte[]> record : records) {
                sent.add(producer.send(record));
            }
            producer.flush();
            List<Object> written = new ArrayList<>();
            for (Future<RecordMetadata> each : sent) {
                RecordMetadata metadata = each.get(PATIENCE_MS, TimeUnit.MILLISECONDS);
                written.add(List.of(metadata.partition(), metadata.offset()));
            }
            return written;
        }

        Object transform(String target, int count) throws Exception {
            producer.beginTransaction();
            List<Object> received = new ArrayList<>();
            List<ProducerRecord<byte[], byte[]>> transformed = new ArrayList<>();
            Map<TopicPartition, OffsetAndMetadata> offsets = new HashMap<>();
            long deadline = System.currentTimeMillis() + PATIENCE_MS;
            while (received.size() < count) {
                if (System.currentTimeMillis() > deadline) {
                    throw new IllegalStateException(received.size() + " of " + count + " records came");
                }
                for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(100))) {
                    TopicPartition from = new TopicPartition(record.topic(), record.partition());
                    if (received.size() == count) {
                        // Read too far: the next transaction is to begin here.
                        if (record.offset() < consumer.position(from)) {
                            consumer.seek(from, record.offset());
                        }
                        continue;
                    }
                    received.add(fields(record));
                    offsets.put(from, new OffsetAndMetadata(record.offset() + 1));
                    byte[] value = java.util.Arrays.copyOf(record.value(), record.value().length + 1);
                    value[value.length - 1] = MARK;
                    transformed.add(new ProducerRecord<>(target, record.partition(), null, value));
                }
            }
            send(target, transformed);
            producer.sendOffsetsToTransaction(offsets, consumer.groupMetadata());
            return received;
        }

        Object end(boolean commit) {
            if (commit) {
                producer.commitTransaction();
            } else {
                producer.abortTransaction();
            }
            return null;
        }

        Object close() {
            if (consumer != null) {
                consumer.close();
            }
            producer.close();
            return null;
        }
    }

    private Object read(String topic, JsonNode command) {
        Map<TopicPartition, Long> ends = new HashMap<>();
        command.get("ends").forEach(pair ->
                ends.put(new TopicPartition(topic, pair.get(0).asInt()), pair.get(1).asLong()));
        List<Object> received = new ArrayList<>();
        try (KafkaConsumer<byte[], byte[]> consumer =
                consumer(command.get("isolation").asText(), Map.of("auto.offset.reset", "none", "fetch.max.wait.ms", 50))) {
            consumer.assign(ends.keySet());
            ends.keySet().forEach(partition -> consumer.seek(partition, 0));
            int count = command.get("count").asInt();
            long deadline = System.currentTimeMillis() + PATIENCE_MS;
            while ((received.size() < count || !positions(consumer, ends).equals(ends))
                    && System.currentTimeMillis() < deadline) {
                consumer.poll(Duration.ofMillis(100)).forEach(record -> received.add(fields(record)));
            }
            long lingerUntil = System.currentTimeMillis() + command.get("linger_ms").asLong();
            while (System.currentTimeMillis() < lingerUntil) {
                consumer.poll(Duration.ofMillis(50)).forEach(record -> received.add(fields(record)));
            }
            Map<Integer, Long> positions = new TreeMap<>();
            positions(consumer, ends).forEach((each, position) -> positions.put(each.partition(), position));
            List<Object> pairs = new ArrayList<>();
            positions.forEach((partition, position) -> pairs.add(List.of(partition, position)));
            return Map.of("records", received, "positions", pairs);
        }
    }

    private static Map<TopicPartition, Long> positions(
            KafkaConsumer<byte[], byte[]> consumer, Map<TopicPartition, Long> ends) {
        Map<TopicPartition, Long> positions = new HashMap<>();
        ends.keySet().forEach(partition -> positions.put(partition, consumer.position(partition)));
        return positions;
    }

    private static List<Object> fields(ConsumerRecord<byte[], byte[]> record) {
        return List.of(
                record.partition(), record.offset(), Base64.getEncoder().encodeToString(record.value()));
    }
}
