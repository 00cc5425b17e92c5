import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/** The loads of transaction_load.py with Kafka's Java clients; the same arguments, the same words. */
public final class TransactionLoad {
    private static final int RECORD_BYTES = 100;
    private static final long INTERVAL_NS = 100_000_000;

    private final Map<String, String> given;
    private final AtomicLong count = new AtomicLong();
    private final AtomicBoolean isOver = new AtomicBoolean();

    public static void main(String[] arguments) throws Exception {
        Map<String, String> given = new HashMap<>();
        for (String word : arguments) {
            given.put(word.substring(0, word.indexOf('=')), word.substring(word.indexOf('=') + 1));
        }
        TransactionLoad load = new TransactionLoad(given);
        if (given.get("load").equals("transform")) {
            load.transform();
        } else {
            load.run();
        }
        Runtime.getRuntime().halt(0);
    }

    private TransactionLoad(Map<String, String> given) {
        this.given = given;
    }

    private KafkaProducer<byte[], byte[]> producer(String transactionalId) {
        Map<String, Object> settings = new HashMap<>();
        settings.put("bootstrap.servers", given.get("bootstrap"));
        settings.put("batch.size", "65536");
        settings.put("linger.ms", given.get("load").equals("small") ? "0" : "5");
        if (transactionalId != null) {
            settings.put("transactional.id", transactionalId);
        }
        KafkaProducer<byte[], byte[]> made =
                new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer());
        if (transactionalId != null) {
            made.initTransactions();
        }
        return made;
    }

    private void run() throws InterruptedException {
        int producers = Integer.parseInt(given.get("producers"));
        List<Thread> threads = new ArrayList<>();
        for (int number = 0; number < producers; number++) {
            KafkaProducer<byte[], byte[]> made = producer(given.get("name") + "-" + number);
            Thread thread = new Thread(() -> {
                if (given.get("load").equals("small")) {
                    small(made);
                } else {
                    large(made);
                }
            });
            threads.add(thread);
            thread.start();
        }
        Thread.sleep((long) (1000 * Double.parseDouble(given.get("warm_up_s"))));
        long before = count.get();
        long began = System.nanoTime();
        System.out.println("begun");
        Thread.sleep((long) (1000 * Double.parseDouble(given.get("seconds"))));
        System.out.println("done " + (count.get() - before) + " " + (System.nanoTime() - began) / 1e9);
        isOver.set(true);
        for (Thread thread : threads) {
            thread.join();
        }
    }

    /** Transactions of one record for each of some partitions. */
    private void small(KafkaProducer<byte[], byte[]> made) {
        int partitions = Integer.parseInt(given.get("partitions"));
        byte[] value = new byte[RECORD_BYTES];
        int turn = 0;
        while (!isOver.get()) {
            made.beginTransaction();
            for (int each = 0; each < partitions; each++) {
                made.send(new ProducerRecord<>(given.get("topic"), (turn + each) % 10, null, value));
            }
            made.commitTransaction();
            turn++;
            count.incrementAndGet();
        }
    }

    /** As many records as go into transactions of 100 ms. */
    private void large(KafkaProducer<byte[], byte[]> made) {
        byte[] value = new byte[RECORD_BYTES];
        while (!isOver.get()) {
            made.beginTransaction();
            long end = System.nanoTime() + INTERVAL_NS;
            int sent = 0;
            while (sent % 100 != 0 || System.nanoTime() < end) {
                made.send(new ProducerRecord<>(given.get("topic"), sent / 100 % 10, null, value));
                sent++;
            }
            made.commitTransaction();
            count.addAndGet(sent);
        }
    }

    /** Read a topic to its end, write each record into another, and commit every 100 ms. */
    private void transform() {
        boolean isExact = given.get("exactly").equals("once");
        int partitions = Integer.parseInt(given.get("partitions"));
        long records = Long.parseLong(given.get("records"));
        KafkaProducer<byte[], byte[]> made = producer(isExact ? given.get("name") : null);
        Map<String, Object> settings = new HashMap<>();
        settings.put("bootstrap.servers", given.get("bootstrap"));
        settings.put("group.id", given.get("name"));
        settings.put("enable.auto.commit", "false");
        settings.put("max.poll.records", "5000");
        settings.put("isolation.level", isExact ? "read_committed" : "read_uncommitted");
        KafkaConsumer<byte[], byte[]> consumer =
                new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer());
        List<TopicPartition> all = new ArrayList<>();
        for (int partition = 0; partition < partitions; partition++) {
            all.add(new TopicPartition(given.get("topic"), partition));
        }
        consumer.assign(all);
        consumer.seekToBeginning(all);
        consumer.position(all.get(0));
        made.partitionsFor(given.get("output"));
        // The first commit of all makes the topic of offsets, which takes its time.
        consumer.commitSync(Map.of(all.get(0), new OffsetAndMetadata(0)));
        System.out.println("begun");
        long began = System.nanoTime();
        long read = 0;
        while (read < records) {
            long end = System.nanoTime() + INTERVAL_NS;
            if (isExact) {
                made.beginTransaction();
            }
            Map<TopicPartition, OffsetAndMetadata> positions = new HashMap<>();
            while (read < records && System.nanoTime() < end) {
                for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(50))) {
                    made.send(new ProducerRecord<>(given.get("output"), record.partition(), null, record.value()));
                    positions.put(
                            new TopicPartition(record.topic(), record.partition()),
                            new OffsetAndMetadata(record.offset() + 1));
                    read++;
                }
            }
            if (isExact) {
                made.sendOffsetsToTransaction(positions, consumer.groupMetadata());
                made.commitTransaction();
            } else {
                made.flush();
                consumer.commitSync(positions);
            }
        }
        System.out.println("done " + read + " " + (System.nanoTime() - began) / 1e9);
    }
}
