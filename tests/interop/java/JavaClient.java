import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.io.Reader;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Base64;
import java.util.Collection;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.CompletionException;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.NewPartitions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.admin.RecordsToDelete;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.CooperativeStickyAssignor;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.consumer.RangeAssignor;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.KafkaFuture;
import org.apache.kafka.common.Node;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.TopicPartitionInfo;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.header.internals.RecordHeader;
import org.apache.kafka.common.protocol.Errors;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Kafka's Java clients behind the line protocol of tests/interop/adapters/program.py.
 *
 * It compiles against kafka-clients 3.9 and 4.x; the few calls that only one of them has are looked up by name.
 */
public final class JavaClient {
    private static final long PATIENCE_MS = 30_000;
    private static final ObjectMapper JSON = new ObjectMapper();

    private final Map<String, Object> common = new HashMap<>();
    private final Admin admin;
    private final List<Member> members = new ArrayList<>();

    public static void main(String[] arguments) throws Exception {
        PrintStream answers = new PrintStream(System.out, false, StandardCharsets.UTF_8);
        JavaClient client = new JavaClient(arguments[0]);
        BufferedReader commands = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = commands.readLine(); line != null; line = commands.readLine()) {
            answers.println(JSON.writeValueAsString(client.answer(JSON.readTree(line))));
            answers.flush();
        }
        System.exit(0);
    }

    private JavaClient(String bootstrap) throws IOException {
        common.put("bootstrap.servers", bootstrap);
        // Settings of every client, such as those of TLS.
        String file = System.getProperty("settings");
        if (file != null) {
            Properties properties = new Properties();
            try (Reader reader = Files.newBufferedReader(Path.of(file))) {
                properties.load(reader);
            }
            properties.forEach((name, value) -> common.put(name.toString(), value));
        }
        this.admin = Admin.create(common);
    }

    private Map<String, Object> answer(JsonNode command) {
        Map<String, Object> answer = new HashMap<>();
        try {
            answer.put("result", run(command));
        } catch (Throwable raised) {
            Throwable error = raised;
            while ((error instanceof ExecutionException || error instanceof CompletionException)
                    && error.getCause() != null) {
                error = error.getCause();
            }
            answer.put("error", Errors.forException(error).name());
            answer.put("message", error.toString());
        }
        return answer;
    }

    private Object run(JsonNode command) throws Exception {
        String topic = command.path("topic").asText();
        String group = command.path("group").asText();
        switch (command.get("do").asText()) {
            case "produce": return produce(topic, command);
            case "consume": return consume(topic, command);
            case "offset": return offset(topic, command);
            case "offset_specs": return offsetSpecs();
            case "join": return join(group, topic, command);
            case "member": return members.get(command.get("member").asInt()).view();
            case "leave": return members.get(command.get("member").asInt()).leave();
            case "resume": return resume(group, topic, command.get("count").asInt());
            case "groups": return groups();
            case "describe_group": return describeGroup(group);
            case "committed": return committed(group, topic, command.get("partitions"));
            case "alter_committed":
                return get(admin.alterConsumerGroupOffsets(group, commits(topic, command.get("offsets"))).all());
            case "delete_committed":
                return get(admin.deleteConsumerGroupOffsets(
                        group, new HashSet<>(partitions(topic, command.get("partitions")))).all());
            case "delete_group": return get(admin.deleteConsumerGroups(List.of(group)).all());
            case "create_topic": return createTopic(topic, command);
            case "delete_topic": return get(admin.deleteTopics(List.of(topic)).all());
            case "create_partitions":
                return get(admin.createPartitions(
                        Map.of(topic, NewPartitions.increaseTo(command.get("count").asInt()))).all());
            case "delete_records": return deleteRecords(topic, command.get("before"));
            case "topics": return get(admin.listTopics().names());
            case "describe_topic": return describeTopic(topic);
            case "describe_configs": return describeConfigs(ConfigResource.Type.TOPIC, topic);
            case "describe_broker": return describeConfigs(ConfigResource.Type.BROKER, command.get("broker").asText());
            case "alter_config": return alterConfig(topic, command);
            case "describe_cluster": return describeCluster();
            default: throw new IllegalArgumentException(command.toString());
        }
    }

    // Reading and writing

    private Object produce(String topic, JsonNode command) throws Exception {
        Map<String, Object> settings = new HashMap<>(common);
        settings.put("acks", command.get("acks").asText());
        settings.put("compression.type", command.get("codec").asText());
        settings.put("enable.idempotence", command.get("idempotent").asBoolean());
        settings.put("linger.ms", 20);
        settings.put("max.request.size", 2_000_000);
        List<Future<RecordMetadata>> sent = new ArrayList<>();
        try (KafkaProducer<byte[], byte[]> producer =
                new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer())) {
            for (JsonNode record : command.get("records")) {
                List<Header> headers = new ArrayList<>();
                for (JsonNode header : record.get("headers")) {
                    headers.add(new RecordHeader(header.get(0).asText(), bytes(header.get(1))));
                }
                sent.add(producer.send(new ProducerRecord<>(
                        topic,
                        record.get("partition").isNull() ? null : record.get("partition").asInt(),
                        record.get("timestamp").isNull() ? null : record.get("timestamp").asLong(),
                        bytes(record.get("key")),
                        bytes(record.get("value")),
                        headers)));
            }
            producer.flush();
        }
        List<Object> written = new ArrayList<>();
        for (Future<RecordMetadata> each : sent) {
            RecordMetadata metadata = each.get(PATIENCE_MS, TimeUnit.MILLISECONDS);
            written.add(List.of(metadata.partition(), metadata.offset()));
        }
        return written;
    }

    private KafkaConsumer<byte[], byte[]> consumer(Map<String, Object> more) {
        Map<String, Object> settings = new HashMap<>(common);
        settings.putAll(more);
        return new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer());
    }

    private Object consume(String topic, JsonNode command) {
        // As Spark's executors do it: assigned, positioned, and lost when the position does not exist.
        try (KafkaConsumer<byte[], byte[]> consumer =
                consumer(Map.of("enable.auto.commit", false, "auto.offset.reset", "none"))) {
            Map<TopicPartition, OffsetAndMetadata> starts = commits(topic, command.get("starts"));
            consumer.assign(starts.keySet());
            starts.forEach((partition, start) -> consumer.seek(partition, start.offset()));
            return receive(consumer, command.get("count").asInt());
        }
    }

    private static List<Object> receive(KafkaConsumer<byte[], byte[]> consumer, int count) {
        List<Object> received = new ArrayList<>();
        long deadline = System.currentTimeMillis() + PATIENCE_MS;
        while (received.size() < count) {
            if (System.currentTimeMillis() > deadline) {
                throw new IllegalStateException(received.size() + " of " + count + " records came");
            }
            for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(100))) {
                if (received.size() < count) {
                    received.add(fields(record));
                }
            }
        }
        return received;
    }

    private Object offset(String topic, JsonNode command) throws Exception {
        TopicPartition asked = new TopicPartition(topic, command.get("partition").asInt());
        JsonNode when = command.get("when");
        OffsetSpec spec = when.isNumber()
                ? OffsetSpec.forTimestamp(when.asLong())
                : (OffsetSpec) OffsetSpec.class.getMethod(camelCase(when.asText())).invoke(null);
        return get(admin.listOffsets(Map.of(asked, spec)).partitionResult(asked)).offset();
    }

    /** The names of all places in a log that this version can ask for. */
    private static Object offsetSpecs() {
        Set<String> names = new TreeSet<>();
        for (var method : OffsetSpec.class.getMethods()) {
            if (method.getReturnType() == OffsetSpec.class && method.getParameterCount() == 0) {
                names.add(method.getName().replaceAll("([A-Z])", "_$1").toLowerCase(Locale.ROOT));
            }
        }
        return names;
    }

    // Groups

    private Object join(String group, String topic, JsonNode command) {
        Map<String, Object> settings = new HashMap<>();
        boolean cooperative = command.get("strategy").asText().equals("cooperative-sticky");
        settings.put("group.id", group);
        settings.put("group.protocol", "classic");
        settings.put("auto.offset.reset", "earliest");
        settings.put("session.timeout.ms", 10_000);
        settings.put("heartbeat.interval.ms", 200);
        settings.put(
                "partition.assignment.strategy",
                (cooperative ? CooperativeStickyAssignor.class : RangeAssignor.class).getName());
        if (!command.get("instance_id").isNull()) {
            settings.put("group.instance.id", command.get("instance_id").asText());
        }
        members.add(new Member(consumer(settings), topic));
        return members.size() - 1;
    }

    /** A consumer that polls on a thread of its own. */
    private static final class Member implements ConsumerRebalanceListener, Runnable {
        private final KafkaConsumer<byte[], byte[]> consumer;
        private final Set<Integer> owned = new TreeSet<>();
        private final Thread thread = new Thread(this, "member");
        private List<Object> records = new ArrayList<>();
        private int revoked;
        private boolean leaving;
        private RuntimeException error;

        Member(KafkaConsumer<byte[], byte[]> consumer, String topic) {
            this.consumer = consumer;
            consumer.subscribe(List.of(topic), this);
            thread.setDaemon(true);
            thread.start();
        }

        @Override
        public void run() {
            try (consumer) {
                while (!isLeaving()) {
                    for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(50))) {
                        synchronized (this) {
                            records.add(fields(record));
                        }
                    }
                }
            } catch (RuntimeException raised) {
                synchronized (this) {
                    error = raised;
                }
            }
        }

        @Override
        public synchronized void onPartitionsAssigned(Collection<TopicPartition> assigned) {
            assigned.forEach(each -> owned.add(each.partition()));
        }

        @Override
        public synchronized void onPartitionsRevoked(Collection<TopicPartition> lost) {
            lost.forEach(each -> owned.remove(each.partition()));
            revoked += leaving ? 0 : lost.size();
        }

        private synchronized boolean isLeaving() {
            return leaving;
        }

        private synchronized List<Object> handOver() {
            if (error != null) {
                throw error;
            }
            List<Object> fresh = records;
            records = new ArrayList<>();
            return fresh;
        }

        synchronized Object view() {
            return Map.of("partitions", List.copyOf(owned), "revoked", revoked, "records", handOver());
        }

        Object leave() throws InterruptedException {
            synchronized (this) {
                leaving = true;
            }
            thread.join(PATIENCE_MS);
            return handOver();
        }
    }

    private Object resume(String group, String topic, int count) {
        Map<String, Object> settings = Map.of(
                "group.id", group,
                "group.protocol", "classic",
                "auto.offset.reset", "earliest",
                "enable.auto.commit", false);
        try (KafkaConsumer<byte[], byte[]> consumer = consumer(settings)) {
            consumer.subscribe(List.of(topic));
            List<Object> received = receive(consumer, count);
            Map<TopicPartition, OffsetAndMetadata> ends = new HashMap<>();
            for (Object each : received) {
                List<?> fields = (List<?>) each;
                ends.put(
                        new TopicPartition(topic, (Integer) fields.get(0)),
                        new OffsetAndMetadata((Long) fields.get(1) + 1));
            }
            consumer.commitSync(ends);
            return received;
        }
    }

    private Object groups() throws Exception {
        // KIP-1043 gave listConsumerGroups its successor in 4.0.
        Object listed = either(admin, "listGroups", "listConsumerGroups");
        List<Object> names = new ArrayList<>();
        for (Object each : (Collection<?>) get((KafkaFuture<?>) either(listed, "all", "all"))) {
            names.add(either(each, "groupId", "groupId"));
        }
        return names;
    }

    private Object describeGroup(String group) throws Exception {
        var described = get(admin.describeConsumerGroups(List.of(group)).describedGroups().get(group));
        List<Object> views = new ArrayList<>();
        for (var member : described.members()) {
            Set<Integer> owned = new TreeSet<>();
            member.assignment().topicPartitions().forEach(each -> owned.add(each.partition()));
            Map<String, Object> view = new HashMap<>();
            view.put("client_id", member.clientId());
            view.put("partitions", owned);
            view.put("instance_id", member.groupInstanceId().orElse(null));
            views.add(view);
        }
        String state = either(described, "groupState", "state").toString();
        return Map.of("state", state, "assignor", described.partitionAssignor(), "members", views);
    }

    private Object committed(String group, String topic, JsonNode wanted) throws Exception {
        Map<TopicPartition, OffsetAndMetadata> all =
                get(admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata());
        List<Object> found = new ArrayList<>();
        for (TopicPartition partition : partitions(topic, wanted)) {
            OffsetAndMetadata commit = all.get(partition);
            found.add(List.of(partition.partition(), commit == null ? -1 : commit.offset()));
        }
        return found;
    }

    // Topics, settings and the cluster

    private Object createTopic(String topic, JsonNode command) throws Exception {
        Map<String, String> configs = new HashMap<>();
        command.get("configs").fields().forEachRemaining(each -> configs.put(each.getKey(), each.getValue().asText()));
        NewTopic wanted = new NewTopic(topic, command.get("partitions").asInt(), (short) 1).configs(configs);
        return get(admin.createTopics(List.of(wanted)).all());
    }

    private Object deleteRecords(String topic, JsonNode before) throws Exception {
        Map<TopicPartition, RecordsToDelete> wanted = new HashMap<>();
        commits(topic, before).forEach((at, end) -> wanted.put(at, RecordsToDelete.beforeOffset(end.offset())));
        return get(admin.deleteRecords(wanted).all());
    }

    private Object describeTopic(String topic) throws Exception {
        List<Object> described = new ArrayList<>();
        for (TopicPartitionInfo each : get(admin.describeTopics(List.of(topic)).allTopicNames()).get(topic).partitions()) {
            described.add(List.of(each.partition(), each.leader().id(), ids(each.replicas()), ids(each.isr())));
        }
        return described;
    }

    private Object describeConfigs(ConfigResource.Type type, String name) throws Exception {
        ConfigResource resource = new ConfigResource(type, name);
        List<Object> described = new ArrayList<>();
        for (ConfigEntry each : get(admin.describeConfigs(List.of(resource)).all()).get(resource).entries()) {
            boolean own = each.source() == ConfigEntry.ConfigSource.DYNAMIC_TOPIC_CONFIG;
            described.add(Arrays.asList(each.name(), each.value(), !own));
        }
        return described;
    }

    private Object alterConfig(String topic, JsonNode command) throws Exception {
        boolean unset = command.get("value").isNull();
        String operation = command.has("operation") ? command.get("operation").asText() : unset ? "DELETE" : "SET";
        ConfigEntry entry =
                new ConfigEntry(command.get("name").asText(), unset ? null : command.get("value").asText());
        AlterConfigOp change = new AlterConfigOp(entry, AlterConfigOp.OpType.valueOf(operation));
        ConfigResource resource = new ConfigResource(ConfigResource.Type.TOPIC, topic);
        return get(admin.incrementalAlterConfigs(Map.of(resource, List.of(change))).all());
    }

    private Object describeCluster() throws Exception {
        var described = admin.describeCluster();
        List<Object> brokers = new ArrayList<>();
        for (Node node : get(described.nodes())) {
            brokers.add(List.of(node.id(), node.host(), node.port()));
        }
        return Map.of(
                "cluster_id", get(described.clusterId()),
                "controller_id", get(described.controller()).id(),
                "brokers", brokers);
    }

    // Between Kafka's values and JSON's

    private static <T> T get(KafkaFuture<T> future) throws Exception {
        return future.get(PATIENCE_MS, TimeUnit.MILLISECONDS);
    }

    /** Call the first of two methods without arguments that the object's public API has. */
    private static Object either(Object object, String newer, String older) throws Exception {
        Class<?> type = object instanceof Admin ? Admin.class : object.getClass();
        try {
            return type.getMethod(newer).invoke(object);
        } catch (NoSuchMethodException absent) {
            return type.getMethod(older).invoke(object);
        }
    }

    private static String camelCase(String name) {
        StringBuilder camel = new StringBuilder();
        for (String word : name.split("_")) {
            camel.append(camel.length() == 0 ? word : Character.toUpperCase(word.charAt(0)) + word.substring(1));
        }
        return camel.toString();
    }

    private static List<TopicPartition> partitions(String topic, JsonNode numbers) {
        List<TopicPartition> partitions = new ArrayList<>();
        numbers.forEach(number -> partitions.add(new TopicPartition(topic, number.asInt())));
        return partitions;
    }

    private static Map<TopicPartition, OffsetAndMetadata> commits(String topic, JsonNode pairs) {
        Map<TopicPartition, OffsetAndMetadata> commits = new LinkedHashMap<>();
        pairs.forEach(pair -> commits.put(
                new TopicPartition(topic, pair.get(0).asInt()), new OffsetAndMetadata(pair.get(1).asLong())));
        return commits;
    }

    private static List<Integer> ids(List<Node> nodes) {
        List<Integer> ids = new ArrayList<>();
        nodes.forEach(node -> ids.add(node.id()));
        return ids;
    }

    private static List<Object> fields(ConsumerRecord<byte[], byte[]> record) {
        List<Object> headers = new ArrayList<>();
        record.headers().forEach(header -> headers.add(Arrays.asList(header.key(), text(header.value()))));
        return Arrays.asList(
                record.partition(), record.offset(), record.timestamp(), text(record.key()), text(record.value()), headers);
    }

    private static byte[] bytes(JsonNode text) {
        return text.isNull() ? null : Base64.getDecoder().decode(text.asText());
    }

    private static String text(byte[] bytes) {
        return bytes == null ? null : Base64.getEncoder().encodeToString(bytes);
    }
}
